#!/usr/bin/env bash
# Weights that are written after deepspeed.initialize are lost at the next step in bf16, without a word.
#
# Version: deepspeed 0.19.8, torch 2.13.0, on the CPU, one rank.
# Expected: the optimizer goes on from the values that were written, as it does in fp32 and in plain PyTorch.
# Seen: with a learning rate of 0 the weight is 3.0 after the write and has its old value after step(), at stages 1, 2:
# the step copies the fp32 master weights back, which were never told.
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


def value_after(stage):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    engine = initialize(model, stage, bf16={"enabled": True}, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    with torch.no_grad():
        model.weight.fill_(3.0)
    engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())
    engine.step()
    return model.weight.float().mean().item()


found = {stage: value_after(stage) for stage in (1, 2)}
print("written: 3.0; after a step with lr=0:", found)
sys.exit(any(abs(value - 3.0) < 0.1 for value in found.values()))
PYTHON
export DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29531
cd "$folder"
status=0
"$folder/env/bin/python" finding.py 2>"$folder/log" || status=$?
(( status == 0 )) || tail -n 5 "$folder/log" >&2
exit "$status"
