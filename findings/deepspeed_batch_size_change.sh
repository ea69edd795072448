#!/usr/bin/env bash
# After DeepSpeed's set_train_batch_size the first update may come too early, with a gradient that is too small.
#
# Version: deepspeed 0.19.8, torch 2.13.0, on the CPU, one rank.
# Expected: each update after the change has as many micro-steps as the new size says.
# Seen: after 3 steps of one micro-step, the size is doubled. The first update comes after one micro-step, whose gradient
# is divided by two: half a step. The micro-steps are counted from the start of the run, not from the change.
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


engine = initialize(nn.Linear(4, 1), 1, gradient_clipping=0.0)
weight = engine.module.weight
counts, moves = [], []
for micro_step in range(3 + 4):
    if micro_step == 3:
        engine.set_train_batch_size(4)
    before, steps = weight.detach().clone(), engine.global_steps
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.step()
    counts.append(engine.global_steps - steps)
    moves.append(round((before - weight).mean().item(), 3))
print(f"updates at each micro-step {counts}, and how far they move the weight {moves}")
sys.exit(not (counts[:5] == [1, 1, 1, 1, 0] and moves[2] == 1.0 and moves[3] == 0.5))
PYTHON
export DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29531
cd "$folder"
status=0
"$folder/env/bin/python" finding.py 2>"$folder/log" || status=$?
(( status == 0 )) || tail -n 5 "$folder/log" >&2
exit "$status"
