"""A script that goes wrong in the way that its argument names, for the messages that pages quote."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import zeroengine

WIDTH = 64
RANK = int(os.environ.get("RANK", "0"))


class Model(nn.Module):
    """Eight layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
        for index in order:
            x = x + self.blocks[index](x).tanh()
        return x.square().mean()


def engine_with(**config: Any) -> zeroengine.Engine:
    torch.manual_seed(0)
    base = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "comm": {"timeout_seconds": 3},
        "units": ["blocks.*"],
    }
    return zeroengine.initialize(Model(), config=base | config)


def batch() -> torch.Tensor:
    return torch.randn(4, WIDTH) + RANK


def train(engine: zeroengine.Engine, steps: int, factor: float = 1.0) -> None:
    for step in range(steps):
        loss = engine(batch())
        engine.backward(loss * (factor if step == 2 else 1.0))
        engine.step()


def skipped_step() -> None:
    train(engine_with(), 4, float("inf"))


def loss_scale_falls() -> None:
    train(engine_with(fp16={"enabled": True, "initial_scale_power": 16, "hysteresis": 1}), 4, 1e6)


def loss_scale_at_minimum() -> None:
    config = {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 4, "hysteresis": 1}
    train(engine_with(fp16=config), 4, float("inf"))


def updates_with_nan() -> None:
    train(engine_with(check_grad_overflow=False), 4, float("inf"))


def does_not_fit() -> None:
    os.environ["ZEROENGINE_FREE_HOST_MEMORY"] = "400KiB"
    engine_with(zero_optimization={"stage": 0})


def out_of_memory() -> None:
    engine = engine_with(zero_optimization={"stage": 1})
    engine(batch().expand(1 << 40, 4, WIDTH))


def killed() -> None:
    engine = engine_with()
    train(engine, 1)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(engine, 3)


def stalled() -> None:
    engine = engine_with()
    for step in range(3):
        if RANK == 1 and step == 2:
            time.sleep(12)
        train(engine, 1)


def other_path() -> None:
    engine = engine_with()
    train(engine, 1)
    engine.backward(engine(batch(), order=range(8) if RANK == 0 else (0, 1, 2, 3, 5, 4, 6, 7)))
    engine.step()
    train(engine, 1)


def only_rank_zero_saves() -> None:
    engine = engine_with()
    train(engine, 1)
    if RANK == 0:
        engine.save_checkpoint("runs/a")
    train(engine, 3)


def different_calls() -> None:
    engine = engine_with()
    engine.full_state_dict() if RANK == 0 else engine.save_checkpoint("runs/a")


def same_batches() -> None:
    engine = engine_with()
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        engine.backward(engine(torch.randn(4, WIDTH, generator=generator)))
        engine.step()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
