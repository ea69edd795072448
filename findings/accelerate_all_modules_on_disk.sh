#!/usr/bin/env bash
# accelerate loads no safetensors file where its device map puts every module on the disk.
#
# Version: accelerate 1.15.0, safetensors 0.8.0, torch 2.13.0, on the CPU.
# Expected: load_checkpoint_in_model() with device_map={"": "disk"} and an offload folder writes all weights there.
# Seen: "SafetensorError: device disk is invalid", also where each module is named. With one module on the CPU it loads.
#
# Exits with 0 while this holds, and with 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 accelerate==1.15.0 safetensors==0.8.0 numpy
cat >"$folder/finding.py" <<'PYTHON'
import sys

import torch
from accelerate import load_checkpoint_in_model
from safetensors.torch import save_file

folder = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
file = f"{folder}/model.safetensors"
save_file(model.state_dict(), file, metadata={"format": "pt"})
for device_map in ({"": "disk"}, {"0": "disk", "1": "disk"}, {"0": "cpu", "1": "disk"}):
    try:
        load_checkpoint_in_model(model, file, device_map=device_map, offload_folder=f"{folder}/offload")
        print(device_map, "loads")
    except Exception as error:
        print(device_map, f"{type(error).__name__}: {error}")
PYTHON
"$folder/env/bin/python" "$folder/finding.py" "$folder" 2>"$folder/log" | tee "$folder/out"
expected="$(printf '%s\n' "{'': 'disk'} SafetensorError: device disk is invalid" \
    "{'0': 'disk', '1': 'disk'} SafetensorError: device disk is invalid" "{'0': 'cpu', '1': 'disk'} loads")"
[[ "$(cat "$folder/out")" == "$expected" ]]
