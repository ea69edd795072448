"""Models whose blocks are split over ranks, and their training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional as F

import zeroengine
from tests.checkpoint.test_adapters import AdaptedLinear
from tests.distributed.models import WIDTH, TinyLM, build
from tests.distributed.training import Task, adamw, ordinary_loop, settings

# It splits the weights, and the bias of ``up``. All other parameters are whole.
PLAN: dict[str, Any] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
# A layer takes a slice of another size than the others' only as a DTensor.
UNEVEN_PLAN = PLAN | {"blocks.*.up": ColwiseParallel(use_local_output=False)}
# The vocabulary has 61 words, of which the ranks have 31 and 30.
WHOLE_PLAN = PLAN | {"tok": "rowwise_whole_input", "head": "colwise_gathered"}
Factory = Callable[[], nn.Module]


# Of adapters only the half that meets what is split is split as well.
ADAPTED_PLAN = {
    "blocks.*.up.base_layer": "colwise",
    "blocks.*.up.lora_B": "colwise",
    "blocks.*.down.base_layer": "rowwise",
    "blocks.*.down.lora_A": "rowwise",
}


class UnevenBlock(nn.Module):
    """A block whose inner width neither 2 nor 4 divide, over which torch splits it unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def small_lm() -> nn.Module:
    """Return a model of two blocks whose embedding and head are tied."""
    return TinyLM(blocks=2)


def tied_lm() -> nn.Module:
    """Return the model, whose embedding and head are to be split as well."""
    return TinyLM(blocks=2)


def untied_lm() -> nn.Module:
    return TinyLM(tied=False, blocks=2)


def one_block_lm() -> nn.Module:
    return TinyLM(tied=False, blocks=1)


def adapted_lm() -> nn.Module:
    """Return a frozen model with adapters of low rank on layers that are to be split, and on one that is not."""
    model = TinyLM(tied=False, blocks=2)
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = AdaptedLinear(block.up), AdaptedLinear(block.down)
    model.head = AdaptedLinear(model.head)
    return model


def uneven_lm() -> nn.Module:
    model = small_lm()
    model.blocks = nn.ModuleList(UnevenBlock() for _ in range(2))
    return model


PLANS = {
    small_lm: PLAN,
    tied_lm: WHOLE_PLAN,
    untied_lm: WHOLE_PLAN,
    one_block_lm: WHOLE_PLAN,
    uneven_lm: UNEVEN_PLAN,
    adapted_lm: ADAPTED_PLAN,
}


def split(factory: Factory, size: int) -> nn.Module:
    """Return a model that is split over groups of ``size`` ranks. ``size`` of 1: it is whole."""
    model = factory()
    return model if size == 1 else zeroengine.parallelize(model, PLANS.get(factory, PLAN), size=size)


def split_task(task: Task, size: int) -> Task:
    """Return the task of the same training, of a model that is split."""
    fields = {key: getattr(task, key) for key in ("data", "optimizer", "steps", "clip", "micro_steps")}
    return Task(functools.partial(split, task.factory, size), **fields)


def by_sample_group(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """Train with the samples of this rank's model group. See ``training.Train``."""
    losses, norms = ordinary_loop(task, engine, engine.sample_group)
    assert engine.memory().gathered == 0
    return losses, norms


def make_split_engine(
    size: int, stage: int, factory: Factory = small_lm, more: Mapping[str, Any] | None = None
) -> zeroengine.Engine:
    """Return an engine of the model, split over groups of ``size`` ranks."""
    model = build(functools.partial(split, factory, size))
    return zeroengine.initialize(model, adamw(model), settings(Task(), stage, **(more or {})))
