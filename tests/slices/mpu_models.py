"""A model as Megatron's: each rank builds its slices as plain parameters, and the modules exchange activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zeroengine
from tests.distributed.models import WIDTH, Block, TinyLM, build
from tests.distributed.training import Task, settings, start
from tests.slices.split_models import small_lm

SLICES = {"blocks.*.up.*": 0, "blocks.*.down.weight": 1}


class Unit:
    """An ``mpu`` of consecutive ranks, with the methods that DeepSpeed's documentation names."""

    def __init__(self, size: int) -> None:
        rank, world_size = start(), dist.get_world_size()
        self.size, self.number = size, rank % size
        # Every rank makes all groups.
        model = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
        data = [dist.new_group(list(range(number, world_size, size))) for number in range(size)]
        self.model, self.data = model[rank // size], data[self.number]

    def get_model_parallel_group(self) -> Any:
        return self.model

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_rank(self) -> int:
        return self.number

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)


class CopyToGroup(torch.autograd.Function):
    """Pass activations on, and sum their gradients over the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOverGroup(torch.autograd.Function):
    """Sum activations over the group, and pass their gradients on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class SlicedBlock(nn.Module):
    """This rank's slices of a ``Block``: rows of ``up``, and columns of ``down``, whose bias each rank has whole."""

    def __init__(self, whole: Block, unit: Unit, num_parts: int = 1) -> None:
        super().__init__()
        self.norm, self.group = whole.norm, unit.model

        def own(tensor: torch.Tensor, dim: int) -> nn.Parameter:
            parts = (part.chunk(unit.size, dim)[unit.number] for part in tensor.chunk(num_parts, dim))
            return nn.Parameter(torch.cat(list(parts), dim).detach().clone())

        inner = 3 * WIDTH // unit.size
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.up.weight, self.up.bias = own(whole.up.weight, 0), own(whole.up.bias, 0)
        self.down.weight, self.down.bias = own(whole.down.weight, 1), whole.down.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up(CopyToGroup.apply(self.norm(x), self.group)))
        return x + SumOverGroup.apply(F.linear(inner, self.down.weight), self.group) + self.down.bias


def sliced_lm(unit: Unit, num_parts: int = 1) -> nn.Module:
    """Return this rank's slices of ``small_lm``."""
    model = small_lm()
    assert isinstance(model, TinyLM)
    model.blocks = nn.ModuleList(SlicedBlock(block, unit, num_parts) for block in model.blocks)  # type: ignore[arg-type]
    return model


def make_mpu_engine(
    size: int, stage: int, more: Mapping[str, Any] | None = None, task: Task | None = None
) -> zeroengine.Engine:
    """Return an engine of the model, over groups of ``size`` ranks. ``size`` of 0: the whole model, without an mpu."""
    start()
    task = task or Task()
    if not size:
        model = build(small_lm)
        return zeroengine.initialize(model, task.optimizer(model), settings(task, stage, **(more or {})))
    unit = Unit(size)
    model = build(lambda: sliced_lm(unit))
    more = {"tensor_parallel": {"slices": SLICES}} | dict(more or {})
    return zeroengine.initialize(model, task.optimizer(model), settings(task, stage, **more), mpu=unit)
