"""A script of accelerate that knows nothing of zeroengine: its settings come from ``accelerate launch`` or a plugin.

``recipe_accelerate.py FOLDER plugin``: the script makes a DeepSpeedPlugin for stage 3. With ``file`` the launcher has
named a configuration with an optimizer and a schedule, and with ``ddp`` nothing is DeepSpeed's.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.integrations.environments import report
from tests.integrations.transformers.models import Tokens, tiny_llama

folder, choice = sys.argv[1], sys.argv[2]
plugin = None
if choice == "plugin":
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2, gradient_clipping=0.5)
# accelerate takes DistributedDataParallel where cpu=True is given, and knows of the other ranks on a machine without a
# GPU only where the backend is named.
accelerator = Accelerator(
    cpu=choice == "ddp",
    kwargs_handlers=[] if choice == "ddp" else [InitProcessGroupKwargs(backend="gloo")],
    gradient_accumulation_steps=2,
    deepspeed_plugin=plugin,
)
set_seed(0)
model = tiny_llama()
if choice == "file":
    # The configuration names the optimizer and the schedule.
    from accelerate.utils import DummyOptim, DummyScheduler

    optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = DummyScheduler(optimizer, warmup_num_steps=2)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    # accelerate counts a step of the schedule for each rank. DeepSpeed's WarmupLR begins a step late.
    schedule = LambdaLR(optimizer, lambda step: min(1.0, max(0.0, step / accelerator.num_processes - 1) / 2))
loader = DataLoader(Tokens(64), batch_size=2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)


def train(steps: int) -> list[float]:
    """Return the mean losses of all ranks in so many micro-steps."""
    losses = []
    for number, batch in enumerate(loader):
        if number == steps:
            break
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


losses = train(8)
accelerator.save_state(f"{folder}/state")
later = train(4)
accelerator.load_state(f"{folder}/state")
again = train(4)
weights = accelerator.get_state_dict(model)
report(
    {
        "losses": losses,
        "later": later,
        "again": again,
        "lr": optimizer.param_groups[0]["lr"],
        "kind": str(accelerator.distributed_type),
        "engine": type(model).__module__,
        "saved": sum(value.double().abs().sum().item() for value in weights.values()) if weights else 0.0,
    }
)
accelerator.end_training()
