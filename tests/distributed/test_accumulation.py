"""Several backwards before a step, and backwards that are not plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine

from .models import WIDTH, build
from .ranks import run_ranks
from .test_parameters import Net, features
from .training import (
    Task,
    Train,
    Trained,
    assert_close,
    assert_same_bits,
    check_every_stage,
    ordinary_loop,
    train_at,
    train_plainly,
)

BOTH = pytest.mark.parametrize("transport", ["shm", "gloo"])


def by_pairs(task: Task, loop: Train, plain: Trained, **more: Any) -> None:
    """The bits of stage 0 at 1, those of 2 at 3; the numbers of plain PyTorch at all."""
    ranks = run_ranks(2, train_at, (0, 1, 2, 3), task, loop, more)
    for found in ranks:
        assert_same_bits(found[0], found[1], "stages 0 and 1")
        assert_same_bits(found[2], found[3], "stages 2 and 3")
    for stage in (0, 2):
        assert_close([found[stage] for found in ranks], plain)


# -- accumulation -------------------------------------------------------------------------------------


@BOTH
def test_micro_steps_add_up_to_the_mean(transport: str) -> None:
    task = Task(micro_steps=3, steps=3)
    by_pairs(task, ordinary_loop, train_plainly(task), comm={"transport": transport})


def boundaries(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """Whether ``step`` updates, and what the counters say, at each micro-step."""
    seen: list[float] = []
    for micro_step in range(task.steps * task.micro_steps):
        boundary = engine.is_gradient_accumulation_boundary()
        engine.backward(engine(*task.data(micro_step, engine.rank)))
        assert bool(engine.step()) is boundary
        seen += [boundary, engine.micro_steps, engine.global_steps]
    assert not engine.skipped_steps
    return seen, [float(engine.rank)]


def test_step_updates_at_the_boundary_alone() -> None:
    for found in run_ranks(2, train_at, (1, 3), Task(micro_steps=2, steps=2), boundaries, {}):
        for trained in found:
            assert trained.losses == [0, 1, 0, 1, 2, 1, 0, 3, 1, 1, 4, 2]


def without_sync(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """All but the last micro-step stay on the rank; every second step all of them do."""
    losses, norms = [], []
    for micro_step in range(task.steps * task.micro_steps):
        loss = engine(*task.data(micro_step, engine.rank))
        if engine.is_gradient_accumulation_boundary() and engine.global_steps % 2 == 0:
            engine.backward(loss)
        else:
            with engine.no_sync():
                engine.backward(loss)
        if engine.step():
            norms.append(engine.grad_norm)
        losses.append(loss.item())
    return losses, norms


@BOTH
def test_no_sync_gives_what_syncing_each_micro_step_gives(transport: str) -> None:
    task = Task(micro_steps=3, steps=4)
    ranks = run_ranks(2, train_at, (0, 1, 2, 3), task, without_sync, {"comm": {"transport": transport}})
    for stage in range(4):
        assert_close([found[stage] for found in ranks], train_plainly(task))


def mixed_sync(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """Synced micro-steps before, between and after local ones."""
    losses, norms = [], []
    for micro_step in range(task.steps * task.micro_steps):
        loss = engine(*task.data(micro_step, engine.rank))
        if micro_step % 2:
            with engine.no_sync():
                loss.backward()
        else:
            loss.backward()
        if engine.step():
            norms.append(engine.grad_norm)
        losses.append(loss.item())
    return losses, norms


def test_no_sync_may_come_at_any_micro_step() -> None:
    for micro_steps in (4, 3):  # the last one of a step is local, or now and then
        task = Task(micro_steps=micro_steps, steps=3)
        ranks = run_ranks(2, train_at, (0, 1, 2, 3), task, mixed_sync, {})
        for stage in range(4):
            assert_close([found[stage] for found in ranks], train_plainly(task))


# -- several backwards --------------------------------------------------------------------------------


def plain_backward(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(task.steps):
        loss = engine(*task.data(step, engine.rank))
        loss.backward()
        assert engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    return losses, norms


def test_plain_loss_backward_is_engine_backward() -> None:
    check_every_stage(Task(), loop=plain_backward)


def backwards(task: Task, engine: zeroengine.Engine, run: Callable[..., list[torch.Tensor]]) -> Any:
    losses, norms = [], []
    for step in range(task.steps):
        found = run(engine.module, engine.backward, *task.data(step, engine.rank))
        assert engine.step()
        losses.append(sum(loss.item() for loss in found))
        norms.append(engine.grad_norm)
    return losses, norms


def plain_backwards(task: Task, run: Callable[..., list[torch.Tensor]]) -> Trained:
    """The same calls on one process, each rank's in turn; ``.grad`` adds up."""
    model = build(task.factory)
    optimizer = task.optimizer(model)
    losses, norms = [], []
    for step in range(task.steps):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(2):
            found = run(model, lambda loss, **more: (loss / 2).backward(**more), *task.data(step, rank))
            total += sum(loss.item() for loss in found) / 2
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip).item())
        optimizer.step()
    return Trained(losses, norms, {name: value.clone() for name, value in model.state_dict().items()})


def two_forwards(model: nn.Module, backward: Any, ids: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Each its own graph, alive at one time; the first is differentiated last."""
    first, second = model(ids[:1], labels[:1]), model(ids[1:], labels[1:])
    backward(second)
    backward(first)
    return [first, second]


def retained(model: nn.Module, backward: Any, ids: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Two losses over one graph. ``Tensor.backward`` alone can retain it."""
    loss = model(ids, labels)
    scale = 1.0 if getattr(backward, "__self__", None) is not None else 0.5
    (scale * loss).backward(retain_graph=True)
    backward(loss.square() * 1e-2)
    return [loss]


def one_after_another(model: nn.Module, backward: Any, ids: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    losses = []
    for part in (slice(0, 1), slice(1, 2)):
        with torch.no_grad():
            model(ids, labels)  # an evaluation in between changes nothing
        losses.append(model(ids[part], labels[part]))
        backward(losses[-1])
    return losses


def loop_two_forwards(task: Task, engine: zeroengine.Engine) -> Any:
    return backwards(task, engine, two_forwards)


def loop_retained(task: Task, engine: zeroengine.Engine) -> Any:
    return backwards(task, engine, retained)


def loop_one_after_another(task: Task, engine: zeroengine.Engine) -> Any:
    return backwards(task, engine, one_after_another)


@BOTH
@pytest.mark.parametrize(
    ("run", "loop"),
    [(two_forwards, loop_two_forwards), (retained, loop_retained), (one_after_another, loop_one_after_another)],
    ids=["two graphs", "one retained graph", "one after another"],
)
def test_two_backwards_before_one_step_add_up(run: Any, loop: Train, transport: str) -> None:
    task = Task()
    check_every_stage(task, loop=loop, plain=plain_backwards(task, run), comm={"transport": transport})


# -- backwards of backwards ---------------------------------------------------------------------------


class Penalised(Net):
    """A penalty on the gradient of the output by the input, as in WGAN-GP."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = x.requires_grad_()
        loss = super().forward(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


class Forces(nn.Module):
    """A model whose output is a derivative of its submodule's, as in molecular dynamics."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        (forces,) = torch.autograd.grad(self.energy(x), x, create_graph=True)
        return forces.square().mean() * 1e3


@pytest.mark.parametrize("factory", [Penalised, Forces])
def test_a_loss_that_holds_a_gradient(factory: Callable[[], nn.Module]) -> None:
    check_every_stage(Task(factory=factory, data=features))


def penalised_outside(model: nn.Module, backward: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.requires_grad_()
    loss = model(x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + slope.square().sum()
    backward(loss)
    return [loss]


def loop_penalised_outside(task: Task, engine: zeroengine.Engine) -> Any:
    found = backwards(task, engine, penalised_outside)
    assert engine.memory().gathered == 0
    return found


def test_a_gradient_penalty_taken_outside_of_the_model() -> None:
    task = Task(factory=Net, data=features)
    check_every_stage(task, loop=loop_penalised_outside, plain=plain_backwards(task, penalised_outside))


# -- a backward that raises ---------------------------------------------------------------------------


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory, say")


def fail_now_and_then(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """Before each step a backward fails half-way and is given up; each may be the engine's or a plain one."""
    losses, norms = [], []
    for step in range(task.steps):
        handle = engine.module.blocks[1].register_forward_hook(lambda module, args, output: Failing.apply(output))
        bad = engine(*task.data(100 + step, engine.rank))
        handle.remove()
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.backward(bad) if step in (1, 3) else bad.backward()
        with pytest.raises(zeroengine.ZeroEngineError, match="step\\(\\) without backward"):
            engine.step()
        loss = engine(*task.data(step, engine.rank))
        engine.backward(loss) if step in (2, 3) else loss.backward()
        assert engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    assert engine.memory().gathered == 0
    return losses, norms


@BOTH
def test_a_backward_that_raised_leaves_no_trace(transport: str) -> None:
    check_every_stage(Task(), loop=fail_now_and_then, comm={"transport": transport})


def fail_forward(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(task.steps):
        with pytest.raises(RuntimeError):
            engine.module(torch.zeros(1, WIDTH + 1))
        with pytest.raises(TypeError):
            engine()
        loss = engine(*task.data(step, engine.rank))
        engine.backward(loss)
        assert engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
        assert engine.memory().gathered == 0
    return losses, norms


def test_a_forward_that_raised_leaves_no_trace() -> None:
    check_every_stage(Task(factory=Net, data=features), loop=fail_forward)


# -- steps that are skipped ---------------------------------------------------------------------------


def skip_bad_steps(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """One rank's gradient is not finite on every second step."""
    losses, norms = [], []
    for step in range(task.steps):
        loss = engine(*task.data(step, engine.rank))
        before = engine.full_state_dict()
        engine.backward(loss * (float("nan") if engine.rank == 1 else 1.0))
        assert not engine.step()
        after = engine.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert engine.skipped_steps == step + 1
        loss = engine(*task.data(step, engine.rank))
        engine.backward(loss)
        assert engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    assert engine.global_steps == task.steps
    return losses, norms


def test_a_step_whose_gradient_is_not_finite_changes_nothing() -> None:
    check_every_stage(Task(steps=3), loop=skip_bad_steps)


def test_the_norm_is_that_of_the_mean_gradient_before_clipping() -> None:
    clipped = check_every_stage(Task(clip=0.5, steps=3))[0]
    free = check_every_stage(Task(clip=0.0, steps=3))[0]
    assert clipped.norms[0] == free.norms[0] > 0.5
    assert not torch.equal(clipped.state["norm.weight"], free.state["norm.weight"])
