"""Trains a task by the engine at several stages and by plain PyTorch, and compares."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks

# The normal run of the suite compares a stage that sums whole gradients with one that partitions everything. Of a test
# file alone, and with bin/test --all, these are all stages: see tests/conftest.py.
STAGES = (1, 3) if os.environ.get("ZEROENGINE_TEST_EVERY_STAGE") == "0" else (0, 1, 2, 3)
Data = Callable[[int, int], tuple[Any, ...]]  # (micro-step, rank) to the arguments of the model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """A large eps keeps elements of almost no gradient from magnifying the order of additions."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)


@dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer, by functions at module level, which any process can import."""

    factory: Callable[[], nn.Module] = TinyLM
    data: Data = batch
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    steps: int = 4
    clip: float = 1.0
    micro_steps: int = 1


@dataclass(frozen=True)
class Trained:
    """What one rank saw."""

    losses: list[float]  # its own, of each micro-step
    norms: list[float]  # of each step
    state: dict[str, torch.Tensor] = field(repr=False)  # the whole model's in the end


Train = Callable[[Task, zeroengine.Engine], tuple[list[float], list[float]]]


def start() -> int:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


def settings(task: Task, stage: int, **more: Any) -> dict[str, Any]:
    given = {"gradient_clipping": task.clip, "gradient_accumulation_steps": task.micro_steps, "optimizer": None}
    return config(stage, **(given | more))


def make_engine(task: Task, stage: int, **more: Any) -> zeroengine.Engine:
    model = build(task.factory)
    return zeroengine.initialize(model, task.optimizer(model), settings(task, stage, **more))


def ordinary_loop(task: Task, engine: zeroengine.Engine, share: int | None = None) -> tuple[list[float], list[float]]:
    """Return the losses and norms on this rank, which takes the samples of its number, or of ``share``."""
    share = engine.rank if share is None else share
    losses, norms = [], []
    for micro_step in range(task.steps * task.micro_steps):
        loss = engine(*task.data(micro_step, share))
        engine.backward(loss)
        if engine.step():
            assert engine.grad_norm is not None
            norms.append(engine.grad_norm)
        losses.append(loss.item())
    return losses, norms


def take_steps(engine: zeroengine.Engine, numbers: range, data: Data = batch, share: int | None = None) -> list[float]:
    """The losses of these micro-steps on this rank, which takes the samples of its number, or of ``share``."""
    share = engine.rank if share is None else share
    losses = []
    for number in numbers:
        loss = engine(*data(number, share))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_at(stages: Sequence[int], task: Task, loop: Train, more: Mapping[str, Any]) -> list[Trained]:
    """On one rank: the same training at each stage in turn."""
    start()
    found = []
    for stage in stages:
        engine = make_engine(task, stage, **copy.deepcopy(dict(more)))
        losses, norms = loop(task, engine)
        found.append(Trained(losses, norms, engine.full_state_dict()))
        engine.close()
    return found


@functools.cache
def train_plainly(task: Task, world_size: int = 2) -> Trained:
    """Train `task` by plain PyTorch, in one process on what all ranks see; once for all tests that compare with it.

    Returns:
        Losses that are the means over ranks. Callers share it and leave it as it is.
    """
    model = build(task.factory)
    optimizer = task.optimizer(model)
    losses, norms = [], []
    for step in range(task.steps):
        optimizer.zero_grad()
        for micro_step in range(step * task.micro_steps, (step + 1) * task.micro_steps):
            mean = torch.stack([model(*task.data(micro_step, rank)) for rank in range(world_size)]).mean()
            (mean / task.micro_steps).backward()
            losses.append(mean.item())
        limit = task.clip or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
    return Trained(losses, norms, {name: value.clone() for name, value in model.state_dict().items()})


def assert_same_bits(first: Trained, second: Trained, what: object = "") -> None:
    assert first.losses == second.losses, what
    assert first.norms == second.norms, what
    assert first.state.keys() == second.state.keys()
    for name, value in first.state.items():
        assert torch.equal(value, second.state[name]), (what, name)


def assert_close(ranks: Sequence[Trained], plain: Trained, tolerance: float = 1e-5) -> None:
    """What the ranks saw together is what plain PyTorch saw."""
    means = [sum(losses) / len(ranks) for losses in zip(*(found.losses for found in ranks), strict=True)]
    assert means == pytest.approx(plain.losses, rel=tolerance)
    for found in ranks:
        assert found.norms == pytest.approx(plain.norms, rel=10 * tolerance)
        assert found.state.keys() == plain.state.keys()
        for name, value in found.state.items():
            torch.testing.assert_close(
                value, plain.state[name], rtol=10 * tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def check_every_stage(
    task: Task,
    *,
    loop: Train = ordinary_loop,
    plain: Trained | None = None,
    stages: Sequence[int] = STAGES,
    tolerance: float = 1e-5,
    **more: Any,
) -> list[Trained]:
    """Trains on 2 ranks: the same bits at each stage, and the numbers of plain PyTorch. Gives what rank 0 saw.

    The stages are those of the normal run, or all of them.
    """
    ranks = run_ranks(2, train_at, stages, task, loop, more)
    for found in ranks:
        for stage, trained in zip(stages, found, strict=True):
            assert_same_bits(found[0], trained, f"stage {stage}")
    assert_close([found[0] for found in ranks], plain if plain is not None else train_plainly(task), tolerance)
    assert ranks[0][0].losses[0] != ranks[1][0].losses[0]  # each saw its own data
    return ranks[0]
