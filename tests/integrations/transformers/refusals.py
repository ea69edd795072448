"""Makes trainers whose settings contradict each other, and reports the messages of the errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from tests.integrations.environments import report
from tests.integrations.transformers.models import Tokens, tiny_llama, training_arguments
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations import versions
from zeroengine.integrations.transformers import ZeroTrainer

DATA = Tokens(8)
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}


def train(config: Any = None, optimizers: Any = (None, None), resume: Any = None, **changes: Any) -> None:
    arguments = training_arguments(max_steps=1, **changes)
    keys = {"zero_config": {"zero_optimization": {"stage": 2}, **(config or {})}, "optimizers": optimizers}
    ZeroTrainer(tiny_llama(), arguments, train_dataset=DATA, **keys).train(resume_from_checkpoint=resume)


def other_optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW(tiny_llama().parameters())


def other_schedule() -> None:
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(other_optimizer())
    ZeroTrainer(
        model,
        training_arguments(max_steps=1),
        train_dataset=DATA,
        zero_config={"zero_optimization": {"stage": 2}},
        optimizers=(optimizer, schedule),
    ).train()


def old_version() -> None:
    with patch.object(versions, "version", {"transformers": "4.57.1", "accelerate": "1.15.0"}.__getitem__):
        versions.require_versions("transformers", "transformers", "accelerate")


CASES: dict[str, Callable[[], None]] = {
    "precision": lambda: train({"bf16": {"enabled": True}}),
    "autocast": lambda: train({"torch_autocast": {"enabled": True}}),
    "rate": lambda: train({"optimizer": {**ADAMW, "params": {**ADAMW["params"], "lr": 1e-4}}}),
    "micro-batch": lambda: train({"train_micro_batch_size_per_gpu": 16}),
    "clipping": lambda: train({"gradient_clipping": 7.0}),
    "fsdp": lambda: train(fsdp=True),
    "casting evaluation": lambda: train(bf16_full_eval=True),
    "two optimizers": lambda: train({"optimizer": ADAMW}, (other_optimizer(), None)),
    "optimizer of another model": lambda: train({}, (other_optimizer(), None)),
    "schedule of another optimizer": other_schedule,
    "two schedules": lambda: train(
        {"scheduler": WARMUP}, (None, torch.optim.lr_scheduler.ConstantLR(other_optimizer()))
    ),
    "no checkpoint": lambda: train(resume="/nowhere/checkpoint-7"),
    "old version": old_version,
}


def main() -> None:
    messages = {}
    for name, case in CASES.items():
        try:
            case()
        except ZeroEngineError as error:
            messages[name] = str(error)
    report(messages)


if __name__ == "__main__":
    main()
