"""The training of a round's ranks in ``test_snapshots.py``, which import no more than it needs."""

from __future__ import annotations

import torch

import zeroengine


def start(size: int = 1, **snapshots: float) -> zeroengine.Engine:
    """Return the engine of a model that is split over groups of ``size`` ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    zeroengine.parallelize(model, {"0": "colwise", "2": "rowwise"}, size=size)
    zero = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
    config = {"train_micro_batch_size_per_gpu": 2, "snapshots": snapshots, **zero}
    return zeroengine.initialize(model, config=config)


def take_step(engine: zeroengine.Engine) -> float:
    torch.manual_seed(engine.global_steps * 2 + engine.sample_group)
    loss = engine(torch.randn(2, 8)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.item())
