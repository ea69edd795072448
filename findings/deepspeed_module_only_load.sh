#!/usr/bin/env bash
# load_checkpoint(load_module_only=True) of DeepSpeed at stage 3 loads nothing, and returns as if it had.
#
# Version: deepspeed 0.19.8, torch 2.13.0, on the CPU, one rank.
# Expected: the weights of the checkpoint, as at stages 0 to 2, or an error.
# Seen: the weights stay those of the new model.
#
# Exits with 0 while this holds, and with 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 deepspeed==0.19.8 numpy
cat >"$folder/finding.py" <<'PYTHON'
import sys

import deepspeed
import torch
from torch import nn

deepspeed.init_distributed("gloo")


def initialize(model, stage, **settings):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        **settings,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def outcome(stage, folder):
    saved, loaded = nn.Linear(4, 1), nn.Linear(4, 1)
    with torch.no_grad():
        saved.weight.fill_(3.0)
        loaded.weight.fill_(5.0)
    initialize(saved, stage).save_checkpoint(folder, tag="a")
    engine = initialize(loaded, stage)
    path, _ = engine.load_checkpoint(folder, tag="a", load_module_only=True)
    with deepspeed.zero.GatheredParameters([loaded.weight], enabled=stage == 3):
        return path is not None, loaded.weight.mean().item()


found = {stage: outcome(stage, f"stage{stage}") for stage in (2, 3)}
print("saved 3.0 over 5.0; (a path was returned, the value after the load) at each stage:", found)
sys.exit(found != {2: (True, 3.0), 3: (True, 5.0)})
PYTHON
export DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29531
cd "$folder"
status=0
"$folder/env/bin/python" finding.py 2>"$folder/log" || status=$?
(( status == 0 )) || tail -n 5 "$folder/log" >&2
exit "$status"
