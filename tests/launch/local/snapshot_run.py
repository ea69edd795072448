"""The training of a round's ranks in ``test_snapshots.py``, which import no more than it needs."""

from __future__ import annotations

import torch

import zeroengine


def start(**snapshots: float) -> zeroengine.Engine:
    torch.manual_seed(0)
    zero = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
    config = {"train_micro_batch_size_per_gpu": 2, "snapshots": snapshots, **zero}
    return zeroengine.initialize(torch.nn.Linear(8, 8), config=config)


def take_step(engine: zeroengine.Engine) -> float:
    torch.manual_seed(engine.global_steps * 2 + engine.rank)
    loss = engine(torch.randn(2, 8)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.item())
