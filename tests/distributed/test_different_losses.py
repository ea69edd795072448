"""Ranks whose losses depend on different modules, although all ranks call all modules: no stall, and equal losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.experts import on_transport
from tests.distributed.models import WIDTH, build, config
from tests.distributed.ranks import run_ranks
from tests.parametrization import in_turn

NUM_BLOCKS = 7


@dataclass
class Loop:
    """How a model is built, and how the losses of ranks differ.

    Attributes:
        seed: Decides which blocks read which, and which are frozen.
        backwards: The number of losses of one forward. Each is run backward, and all but the last retain the graph.
        plain: Whether the loop calls ``loss.backward()``.
        checkpoints: Whether every other block is inside an activation checkpoint.
        frozen: Whether some blocks are frozen.
        direct: Whether the loop calls the model's modules without calling the model.
        prefetches: Whether units are gathered ahead. Otherwise a gather waits for the ranks that come to it last.
    """

    seed: int
    backwards: int = 1
    plain: bool = False
    checkpoints: bool = False
    frozen: bool = False
    direct: bool = False
    prefetches: bool = False


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


class RandomGraph(nn.Module):
    """Blocks of which each reads one or two earlier ones, drawn at random."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(loop.seed)
        self.checkpoints = loop.checkpoints
        for number in range(NUM_BLOCKS):
            setattr(self, f"block{number}", Block())
            if loop.frozen and torch.rand((), generator=draws) < 0.3:
                getattr(self, f"block{number}").requires_grad_(False)
        self.read = [
            [int(torch.randint(0, number + 1, (), generator=draws)) for _ in range(2)] for number in range(NUM_BLOCKS)
        ]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        outputs = [x]
        for number, read in enumerate(self.read):
            block = getattr(self, f"block{number}")
            inputs = sum(outputs[index] for index in sorted(set(read)))
            if self.checkpoints and number % 2:
                outputs.append(checkpoint(block, inputs, use_reentrant=False))
            else:
                outputs.append(block(inputs))
        return outputs[1:]


def train(transport: str, stage: int, loop: Loop, steps: int) -> list[float]:
    """Each step's losses of this rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    units = [f"block{number}" for number in range(NUM_BLOCKS)]
    with on_transport(transport) as comm:
        ahead = 10**6 if loop.prefetches else 0
        settings = config(stage, units=units, comm=comm, zero_optimization={"prefetch_bucket_size": ahead})
        engine = zeroengine.initialize(build(partial(RandomGraph, loop)), config=settings)
        losses: list[float] = []
        for step in range(steps):
            draws = torch.Generator().manual_seed(1000 * loop.seed + 10 * step + engine.rank)
            call = engine.module.forward if loop.direct else engine
            outputs = call(torch.randn(4, WIDTH, generator=draws))
            trained = [output for output in outputs if output.requires_grad]
            step_losses = []
            for _ in range(loop.backwards):
                first, second = torch.randint(0, len(trained), (2,), generator=draws).tolist()
                step_losses.append(trained[first].square().mean() + trained[second].square().mean())
            if engine.rank:
                # The other rank keeps the graphs of outputs that no loss needs.
                del outputs, trained
            for number, loss in enumerate(step_losses):
                more: dict[str, Any] = {"retain_graph": number < loop.backwards - 1}
                loss.backward(**more) if loop.plain else engine.backward(loss, **more)
                losses.append(loss.item())
            engine.step()
        engine.close()
    return losses


def compare(transport: str, loops: list[Loop], steps: int) -> list[Loop]:
    """The loops whose losses at stage 3 are not those of stage 0."""
    return [loop for loop in loops if not _is_equal(transport, loop, steps)]


def _is_equal(transport: str, loop: Loop, steps: int) -> bool:
    expected, losses = (train(transport, stage, loop, steps) for stage in (0, 3))
    # Stage 0 adds all backwards of a rank before it adds ranks. All-reduces of Gloo have an order of their own.
    tolerance = 1e-5 if transport == "nccl" or loop.backwards > 1 else 0.0
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(expected, losses, strict=True))


KINDS: dict[str, dict[str, Any]] = {
    "engine.backward": {},
    "plain": {"plain": True},
    "checkpoints": {"checkpoints": True},
    "frozen blocks": {"frozen": True},
    "two backwards": {"backwards": 2},
    "prefetches": {"prefetches": True},
    "direct calls": {"direct": True},
}


# Each of the others is this with one thing more.
SHORT = [pytest.param("engine.backward", id="engine.backward", marks=pytest.mark.slow), *list(KINDS)[1:]]


@in_turn(("kind", "transport"), SHORT, ("shm", "nccl", "gloo"))
def test_losses_of_ranks_may_depend_on_different_modules(kind: str, transport: str) -> None:
    loops = [Loop(seed, **KINDS[kind]) for seed in range(2)]
    assert run_ranks(2, compare, transport, loops, 5, timeout=90.0) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ("shm", "gloo", "nccl"))
def test_losses_of_three_ranks_depend_on_different_modules_of_many_models(transport: str, kind: str) -> None:
    loops = [Loop(seed, **KINDS[kind]) for seed in range(100, 120)]
    assert run_ranks(3, compare, transport, loops, 10, timeout=600.0) == [[]] * 3
