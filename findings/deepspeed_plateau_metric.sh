#!/usr/bin/env bash
# A ReduceLROnPlateau that is passed to deepspeed.initialize is fed the batch size as its metric.
#
# Version: deepspeed 0.19.8, torch 2.13.0, on the CPU, one rank.
# Expected: an error, since step() knows no metric; or the loss.
# Seen: `best` is the train batch size, which never falls, so the rate is cut every patience + 1 steps whatever the loss.
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


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 1}}
engine = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
losses, rates = [], []
for step in range(4):
    loss = engine(torch.ones(2, 4)).mean()
    engine.backward(loss)
    engine.step()
    losses.append(round(loss.item(), 6))
    rates.append(optimizer.param_groups[0]["lr"])
print(f"losses {losses}, rates {rates}, best metric {schedule.best}, train batch size {engine.train_batch_size()}")
falls = all(later < earlier for earlier, later in zip(losses, losses[1:]))
sys.exit(not (falls and schedule.best == engine.train_batch_size() and rates[-1] < 0.01))
PYTHON
export DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29531
cd "$folder"
status=0
"$folder/env/bin/python" finding.py 2>"$folder/log" || status=$?
(( status == 0 )) || tail -n 5 "$folder/log" >&2
exit "$status"
