#!/usr/bin/env bash
# DeepSpeed's default gradient clipping clips Muon's orthogonalised update at stages 1 and 2, not the gradient.
#
# Version: deepspeed 0.19.8, torch 2.13.0, on the CPU, one rank.
# Expected: clipping bounds the gradient, which does not change the direction that Muon takes, so all stages move alike.
# Seen: where `gradient_clipping` is not named it is 1.0, and 16 matrices of 16 x 16 move about 5.5 times less at
# stages 1 and 2 than at stage 0.
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


def move_of(stage):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(16)])
    for param in model.parameters():
        param.use_muon = True
    engine = initialize(model, stage, optimizer={"type": "Muon", "params": {"lr": 0.02}})
    before = [param.detach().clone() for param in model.parameters()]
    engine.backward(engine(torch.randn(4, 16)).pow(2).sum() * 1e8)
    engine.step()
    moved = [(param - old).norm().item() for param, old in zip(model.parameters(), before)]
    return sum(moved) / len(moved)


found = {stage: move_of(stage) for stage in (0, 1, 2)}
print("mean distance that a matrix moves:", {stage: round(value, 5) for stage, value in found.items()})
sys.exit(not all(found[0] > 3 * found[stage] for stage in (1, 2)))
PYTHON
export DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29531
cd "$folder"
status=0
"$folder/env/bin/python" finding.py 2>"$folder/log" || status=$?
(( status == 0 )) || tail -n 5 "$folder/log" >&2
exit "$status"
