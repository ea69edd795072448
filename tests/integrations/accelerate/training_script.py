"""Trains under accelerate's DDP and on the engine at several stages, and reports the losses. Run by the tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from tests.integrations.accelerate.loops import STEPS, config, data, forget, loading, loss_of, prepared, train
from tests.integrations.environments import report
from zeroengine import engine_of
from zeroengine.integrations.accelerate import ZeroAccelerator


def main() -> None:
    folder = Path(sys.argv[1])
    results: dict[str, Any] = {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS, dataloader_config=loading())
    results["ddp"] = train(accelerator, prepared(accelerator), range(2))
    for stage in (0, 2, 3):
        forget()
        accelerator = ZeroAccelerator(
            zero_config=config(stage), gradient_accumulation_steps=STEPS, dataloader_config=loading()
        )
        objects = model, *_ = prepared(accelerator)
        assert engine_of(model) is not None and engine_of(model).config.zero_optimization.stage == stage

        def save(epoch: int, stage: int = stage, accelerator: ZeroAccelerator = accelerator) -> None:
            if epoch == 0:
                accelerator.save_state(str(folder / f"stage{stage}"))

        results[f"stage {stage}"] = train(accelerator, objects, range(2), save)
        results[f"evaluation {stage}"] = evaluate(accelerator, objects)
        accelerator.free_memory(model)
    for saved, stage in ((3, 3), (2, 2), (0, 3), (3, 2)):
        forget()
        accelerator = ZeroAccelerator(
            zero_config=config(stage), gradient_accumulation_steps=STEPS, dataloader_config=loading()
        )
        objects = model, *_ = prepared(accelerator)
        accelerator.load_state(str(folder / f"stage{saved}"))
        results[f"from {saved} at {stage}"] = train(accelerator, objects, range(1, 2))
        accelerator.free_memory(model)
    report(results)


def evaluate(accelerator: ZeroAccelerator, objects: tuple[Any, ...]) -> int:
    """Return the number of samples that `gather_for_metrics` collects."""
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.utils.data.Subset(data(), range(27)), batch_size=2))
    total = 0
    objects[0].eval()
    with torch.no_grad():
        for batch in loader:
            losses = accelerator.gather_for_metrics(loss_of(objects[0], batch).repeat(len(batch[0])))
            total += len(losses)
    objects[0].train()
    return total


main()
