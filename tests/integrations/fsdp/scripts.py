"""The training loop of an FSDP2 script, and the same loop after it moved to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zeroengine
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.training import adamw, start

MAX_NORM = 0.5


@dataclass(frozen=True)
class Script:
    """A script, by what it passes to ``fully_shard`` and the number of backwards before each update."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    windows: Sequence[int] = (1, 1, 1, 1, 1)

    @property
    def accumulation(self) -> int:
        return max(self.windows)


def untied() -> nn.Module:
    return TinyLM(tied=False)


def mesh_of_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def sharded(arguments: dict[str, Any] | None = None, seed: int = 0) -> nn.Module:
    start()
    model = build(untied, seed)
    mesh = mesh_of_ranks()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **(arguments or {}))
    fully_shard(model, mesh=mesh, **(arguments or {}))
    return model


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)


def train_by_fsdp2(script: Script, rank: int) -> list[float]:
    """Return the loss of each backward of this rank, and the norm of each update."""
    model = sharded(script.arguments)
    optimizer = adamw(model)
    schedule = schedule_of(optimizer)
    values, step = [], 0
    for window in script.windows:
        for micro_step in range(window):
            model.set_requires_gradient_sync(micro_step == window - 1)
            loss = model(*batch(step, rank)) / window
            loss.backward()
            values.append(loss.item() * window)
            step += 1
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        values.append(norm.full_tensor().item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return values


def train_by_engine(config: dict[str, Any], script: Script, rank: int) -> list[float]:
    """Train as ``train_by_fsdp2`` does, by the same lines wherever they may stay."""
    start()
    model = build(untied)
    optimizer = adamw(model)
    engine = zeroengine.initialize(model, optimizer, config)
    schedule = schedule_of(optimizer)
    values, step = [], 0
    for window in script.windows:
        for _ in range(window):
            loss = engine(*batch(step, rank)) / window
            loss.backward()
            values.append(loss.item() * window)
            step += 1
        values.append(engine.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    engine.close()
    return values


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
