"""Evaluation between steps, buffers, and the mode of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_parameters import Net, features
from tests.distributed.training import (
    STAGES,
    Task,
    Trained,
    assert_same_bits,
    check_every_stage,
    make_engine,
    ordinary_loop,
    settings,
    start,
    train_at,
)
from tests.emulated import cpu_alone
from tests.parametrization import SHARED_MEMORY_AND_SLOW_GLOO, TRANSPORTS, in_turn


def evaluating(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """Before the forward, between forward and backward, between backward and step, in every way."""
    losses, norms, held_out = [], [], []

    def evaluate(context: Any) -> None:
        with context:
            held_out.append(engine(*task.data(99, engine.rank)).item())

    for step in range(task.steps):
        evaluate(torch.no_grad())
        loss = engine(*task.data(step, engine.rank))
        evaluate(torch.no_grad())
        evaluate(torch.inference_mode())
        evaluate(torch.enable_grad())  # a forward that nobody differentiates
        engine.backward(loss)
        evaluate(torch.inference_mode())
        assert engine.step()
        assert len(set(held_out[-5:])) == 1, "nothing changed in between"
        assert engine.memory().gathered == 0
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    assert held_out[-1] != held_out[0]
    return losses, norms


@SHARED_MEMORY_AND_SLOW_GLOO
def test_evaluation_anywhere_between_steps_changes_nothing(transport: str) -> None:
    check_every_stage(Task(), loop=evaluating, comm={"transport": transport})


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(self.drop(x))


def modes() -> None:
    start()
    engine = make_engine(Task(factory=Dropping, data=features), 3)
    (x,) = features(0, 0)
    assert engine.eval() is engine and not engine.module.training
    with torch.no_grad():
        assert engine(x).item() == engine(x).item()
        assert engine.train() is engine and engine.module.drop.training
        assert engine(x).item() != engine(x).item()


def test_train_and_eval_set_the_mode_of_every_module() -> None:
    run_ranks(2, modes)


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(24)
        self.shared = nn.BatchNorm1d(24, affine=False)
        self.again = self.shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(self.again(self.shared(self.batch_norm(x))))


def normalised(stages: tuple[int, ...], task: Task) -> list[tuple[Trained, list[float]]]:
    """Each stage's training, and what evaluation with the running statistics gives then."""
    rank = start()
    found = []
    for stage in stages:
        torch.manual_seed(rank)  # `initialize` gives rank 0's values and buffers to all
        model = Normalised()
        model.batch_norm.running_mean.fill_(rank)
        engine = zeroengine.initialize(model, task.optimizer(model), settings(task, stage))
        assert engine.module.batch_norm.running_mean[0] == 0
        losses, norms = ordinary_loop(task, engine)
        state = engine.full_state_dict()
        with torch.no_grad():
            evaluated = engine.eval()(*features(77, rank)).item()
        found.append((Trained(losses, norms, state), [evaluated, state["batch_norm.num_batches_tracked"].item()]))
    return found


def test_batch_norm_keeps_each_rank_s_running_statistics_as_plain_pytorch_would() -> None:
    task = Task(factory=Normalised, data=features)
    ranks = run_ranks(2, normalised, STAGES, task)
    for found in ranks:
        for trained, statistics in found[1:]:
            assert_same_bits(found[0][0], trained)
            assert statistics == found[0][1]
    plain = [build(Normalised) for _ in range(2)]  # statistics are local, parameters are one
    for own, other in zip(plain[1].parameters(), plain[0].parameters(), strict=True):
        own.data = other.data
    optimizer = task.optimizer(plain[0])
    for step in range(task.steps):
        for rank, model in enumerate(plain):
            loss = model(*features(step, rank))
            assert ranks[rank][0][0].losses[step] == pytest.approx(loss.item(), rel=1e-5)
            (loss / 2).backward()
        for own, other in zip(plain[0].parameters(), plain[1].parameters(), strict=True):
            own.grad += other.grad
            other.grad = None
        torch.nn.utils.clip_grad_norm_(plain[0].parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
    for rank, model in enumerate(plain):
        trained, (evaluated, batches) = ranks[rank][0]
        assert batches == task.steps
        for name, value in model.state_dict().items():
            torch.testing.assert_close(trained.state[name], value, rtol=1e-4, atol=1e-5)
        assert evaluated == pytest.approx(model.eval()(*features(77, rank)).item(), rel=1e-4)


# -- activation checkpointing -------------------------------------------------------------------------


class Checkpointed(Net):
    reentrant = False
    segments = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.stem(x)
        for i in range(0, len(self.blocks), self.segments):
            run = nn.Sequential(*self.blocks[i : i + self.segments])
            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.loss(x)


class Reentrant(Checkpointed):
    reentrant = True


class Twice(Net):
    """Calls the same blocks again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.stem(x)
        for block in (*self.blocks, *self.blocks):
            x = checkpoint(block, x, use_reentrant=True)
        return self.loss(x)


def by_its_forward(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """Like ``ordinary_loop``, but calls each module by itself, and never the model."""
    losses, norms = [], []
    for step in range(task.steps):
        loss = engine.module.forward(*task.data(step, engine.rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm or 0.0)
    return losses, norms


class InSegments(Checkpointed):
    segments = 2


class Plain(Net):
    """The same modules without checkpointing."""


# Segments are such checkpoints.
FACTORIES = [pytest.param(Checkpointed, id="Checkpointed", marks=pytest.mark.slow), Reentrant, InSegments]


@in_turn(("factory", "transport"), FACTORIES, TRANSPORTS)
def test_activation_checkpointing_changes_no_bit(factory: Any, transport: str) -> None:
    comm = {"transport": transport}
    recomputed = check_every_stage(Task(factory=factory, data=features), comm=comm)
    stored = run_ranks(2, train_at, (0,), Task(factory=Plain, data=features), ordinary_loop, {"comm": comm})[0]
    assert_same_bits(recomputed[0], stored[0])


def test_checkpoints_that_are_called_twice_outside_of_the_model_have_the_same_bits_at_every_stage() -> None:
    check_every_stage(Task(factory=Twice, data=features), loop=by_its_forward)


def record(channel: Any, operations: list[str], issued: list[str]) -> None:
    """From now on the names of the units of these operations go to ``issued``."""

    def recording(real: Any) -> Any:
        def operation(first: Any, *rest: Any, **more: Any) -> Any:
            issued.append(next(value for value in rest if isinstance(value, str)))
            return real(first, *rest, **more)

        return operation

    for name in operations:
        setattr(channel, name, recording(getattr(channel, name)))


def gathers_per_step(tasks: list[Task], transport: str, more: dict[str, Any]) -> list[list[str]]:
    start()
    found = []
    for task in tasks:
        engine = make_engine(task, 3, comm={"transport": transport}, **more)
        issued: list[str] = []
        record(engine.gatherer._transport.gather, ["all_gather"], issued)
        for step in range(3):
            issued.clear()
            engine.backward(engine(*task.data(step, engine.rank)))
            engine.step()
        found.append(sorted(issued))
    return found


@SHARED_MEMORY_AND_SLOW_GLOO
def test_activation_checkpointing_gathers_no_unit_twice_in_the_backward(transport: str) -> None:
    tasks = [Task(factory=factory, data=features) for factory in (Plain, Checkpointed, Reentrant, InSegments)]
    more = {"units": ["stem", "blocks.*", "head"]}
    plain, *others = run_ranks(2, gathers_per_step, tasks, transport, more)[0]
    # The last unit stays from forward to backward.
    assert plain == sorted(["stem", "blocks.0", "blocks.1", "blocks.2"] * 2 + ["head"])
    assert others == [plain] * 3


def gathers_of_evaluations(transport: str) -> list[tuple[list[str], int]]:
    start()
    engine = make_engine(Task(), 3, comm={"transport": transport})
    issued: list[str] = []
    record(engine.gatherer._transport.gather, ["all_gather"], issued)
    found = []
    for _ in range(3):
        issued.clear()
        with torch.no_grad():
            engine(*batch(0, engine.rank))
        blocks = sorted(name for name in issued if name.startswith("blocks"))
        found.append((blocks, engine.memory().gathered))
    return found


@SHARED_MEMORY_AND_SLOW_GLOO
def test_an_evaluation_gathers_each_block_once_and_leaves_nothing_whole(transport: str) -> None:
    """With a tied embedding too, whose unit is used first and last: nothing follows the second time."""
    for found in run_ranks(2, gathers_of_evaluations, transport):
        assert found == [(["blocks.0", "blocks.1", "blocks.2"], 0)] * 3


class InBlocksAlone(Reentrant):
    """All that trains is inside the checkpoints, as with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.head.requires_grad_(False)
        for block in self.blocks:
            block.up.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.requires_grad_())


def reduces_per_step(stages: tuple[int, ...]) -> list[list[str]]:
    start()
    task = Task(factory=InBlocksAlone, data=features)
    found = []
    for stage in stages:
        engine = make_engine(task, stage)
        issued: list[str] = []
        record(engine.reducer.launcher._transport.reduce, ["all_reduce", "reduce_scatter"], issued)
        for step in range(2):
            issued.clear()
            engine.backward(engine(*task.data(step, engine.rank)))
            engine.step()
        found.append(issued)
    return found


def test_reentrant_checkpoints_reduce_each_unit_once() -> None:
    """Each of them is a backward inside the backward."""
    check_every_stage(Task(factory=InBlocksAlone, data=features))
    for issued in run_ranks(2, reduces_per_step, (0, 1, 2, 3))[0]:
        assert issued == ["blocks.2", "blocks.1", "blocks.0"]


# -- autocast -----------------------------------------------------------------------------------------


class Autocast(TinyLM):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, labels)


@cpu_alone("autocast casts other operations on a GPU")
def test_autocast_in_an_fp32_model_trains_as_plain_autocast() -> None:
    check_every_stage(Task(factory=Autocast), tolerance=2e-3)
