"""Several backwards before a step, and backwards that are not plain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.models import WIDTH, TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_parameters import Net, features
from tests.distributed.training import (
    Task,
    Train,
    Trained,
    assert_close,
    assert_same_bits,
    check_every_stage,
    make_engine,
    ordinary_loop,
    start,
    train_at,
    train_plainly,
)
from tests.parametrization import SHARED_MEMORY_AND_SLOW_GLOO, TRANSPORTS, in_turn


def by_pairs(task: Task, loop: Train, plain: Trained, **more: Any) -> None:
    """The bits of stage 0 at 1, those of 2 at 3; the numbers of plain PyTorch at all."""
    ranks = run_ranks(2, train_at, (0, 1, 2, 3), task, loop, more)
    for found in ranks:
        assert_same_bits(found[0], found[1], "stages 0 and 1")
        assert_same_bits(found[2], found[3], "stages 2 and 3")
    for stage in (0, 2):
        assert_close([found[stage] for found in ranks], plain)


# -- accumulation -------------------------------------------------------------------------------------


@SHARED_MEMORY_AND_SLOW_GLOO
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


@pytest.mark.slow  # the test below has micro-steps inside and outside of it
@pytest.mark.parametrize("transport", TRANSPORTS)
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


# The last one of a step is local, or now and then.
@pytest.mark.parametrize("micro_steps", [pytest.param(4, marks=pytest.mark.slow), 3])
def test_no_sync_may_come_at_any_micro_step(micro_steps: int) -> None:
    task = Task(micro_steps=micro_steps, steps=3)
    ranks = run_ranks(2, train_at, (0, 1, 2, 3), task, mixed_sync, {})
    for stage in range(4):
        assert_close([found[stage] for found in ranks], train_plainly(task))


# -- manual accumulation ------------------------------------------------------------------------------

WINDOWS = (3, 1, 4, 2)  # micro-steps of each step, as where the last step of an epoch is short
MANUAL = {"gradient_accumulation_steps": "manual"}


def windows(engine: zeroengine.Engine, task: Task, boundaries: bool, step: Callable[[], Any]) -> Any:
    losses, norms, number = [], [], 0
    for window in WINDOWS:
        for micro_step in range(window):
            last = micro_step == window - 1
            if boundaries:
                engine.set_gradient_accumulation_boundary(last)
                assert engine.is_gradient_accumulation_boundary() is last
            loss = engine(*task.data(number, engine.rank))
            engine.backward(loss)
            whole = [grads.launched_in_step for grads in engine.reducer.gradients if not grads.format.is_sharded]
            assert all(reduced == (boundaries and last) for reduced in whole), "reduced in the last backward, if told"
            losses.append(loss.item())
            number += 1
        step()
        norms.append(engine.grad_norm)
    assert engine.global_steps == len(WINDOWS)
    return losses, norms


def manual(task: Task, engine: zeroengine.Engine) -> Any:
    assert engine.is_gradient_accumulation_boundary()
    return windows(engine, task, False, engine.step)


def manual_with_boundaries(task: Task, engine: zeroengine.Engine) -> Any:
    return windows(engine, task, True, engine.optimizer.step)


def plain_windows(task: Task) -> Trained:
    """The mean over ranks, and the sum over the micro-steps of each window."""
    model = build(task.factory)
    optimizer = task.optimizer(model)
    losses, norms = [], []
    for window in WINDOWS:
        optimizer.zero_grad()
        for _ in range(window):
            mean = torch.stack([model(*task.data(len(losses), rank)) for rank in range(2)]).mean()
            mean.backward()
            losses.append(mean.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip).item())
        optimizer.step()
    return Trained(losses, norms, {name: value.clone() for name, value in model.state_dict().items()})


@in_turn(("loop", "transport"), [manual, manual_with_boundaries], TRANSPORTS)
def test_manual_accumulation_steps_after_as_many_backwards_as_come(loop: Train, transport: str) -> None:
    by_pairs(Task(), loop, plain_windows(Task()), comm={"transport": transport}, **MANUAL)


def deepspeed_boundaries(task: Task, engine: zeroengine.Engine) -> Any:
    """``step`` after each micro-step, as in DeepSpeed's manual loops."""
    losses, norms = [], []
    for window in WINDOWS:
        for micro_step in range(window):
            engine.set_gradient_accumulation_boundary(micro_step == window - 1)
            loss = engine(*task.data(len(losses), engine.rank))
            engine.backward(loss)
            assert engine.step() == (micro_step == window - 1)
            losses.append(loss.item())
        norms.append(engine.grad_norm)
    assert engine.micro_steps == len(losses)
    return losses, norms


def test_step_ends_a_micro_step_where_the_boundary_was_said_to_be_elsewhere() -> None:
    by_pairs(Task(), deepspeed_boundaries, plain_windows(Task()), **MANUAL)


def manual_details(directory: str) -> None:
    start()
    for stage in (0, 3):
        engine = make_engine(Task(), stage, bf16={"enabled": True}, **MANUAL)
        assert {grads.flat_grads.dtype for grads in engine.reducer.gradients} == {torch.float32}
        engine.backward(engine(*batch(0, engine.rank)))
        with pytest.raises(
            zeroengine.ZeroEngineError, match=r"would lose their gradients: call it after a step\(\) that"
        ):
            engine.save_checkpoint(directory)
        engine.set_gradient_accumulation_boundary(False)
        with pytest.raises(zeroengine.ZeroEngineError, match="set it to True before the last backward"):
            engine.optimizer.step()
        assert not engine.step()
        with pytest.raises(zeroengine.ZeroEngineError, match='"gradient_accumulation_steps": "manual"'):
            engine.save_checkpoint(directory)
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(*batch(1, engine.rank)))
        assert engine.step()
        engine.save_checkpoint(directory, f"manual-{stage}")
        counters = (engine.global_steps, engine.micro_steps)
        engine.backward(engine(*batch(2, engine.rank)))
        engine.load_checkpoint(directory, f"manual-{stage}")
        with pytest.raises(zeroengine.ZeroEngineError, match="without backward"):
            engine.step()  # what came before the load went with the weights that it was computed by
        assert (engine.global_steps, engine.micro_steps) == counters
        engine.close()
    counted = make_engine(Task(micro_steps=2), 1)
    with pytest.raises(zeroengine.ZeroEngineError, match="gradient_accumulation_steps is 2, and the engine counts"):
        counted.set_gradient_accumulation_boundary(True)
    counted.backward(counted(*batch(0, counted.rank)))
    counted.step()
    with pytest.raises(zeroengine.ZeroEngineError, match='write "gradient_accumulation_steps": "manual"'):
        counted.save_checkpoint(directory)


def test_manual_accumulation_adds_in_fp32_and_saves_between_steps_alone(tmp_path: Path) -> None:
    run_ranks(2, manual_details, str(tmp_path))


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


@in_turn(
    ("runs", "transport"),
    [
        pytest.param((two_forwards, loop_two_forwards), id="two graphs"),
        pytest.param((retained, loop_retained), id="one retained graph"),
        pytest.param((one_after_another, loop_one_after_another), id="one after another"),
    ],
    TRANSPORTS,
)
def test_two_backwards_before_one_step_add_up(runs: tuple[Any, Train], transport: str) -> None:
    task, (run, loop) = Task(), runs
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
def test_a_loss_that_holds_a_gradient_trains_as_plain_pytorch(factory: Callable[[], nn.Module]) -> None:
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


def test_a_gradient_penalty_outside_of_the_model_trains_as_plain_pytorch() -> None:
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


@SHARED_MEMORY_AND_SLOW_GLOO
def test_a_backward_that_raised_leaves_no_trace(transport: str) -> None:
    check_every_stage(Task(), loop=fail_now_and_then, comm={"transport": transport})


def failing_backward(engine: zeroengine.Engine, number: int, plain: bool) -> None:
    """A backward that raises half-way, after some gradients have come."""
    handle = engine.module.blocks[1].register_forward_hook(lambda module, args, output: Failing.apply(output))
    loss = engine(*batch(number, engine.rank))
    handle.remove()
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.backward() if plain else engine.backward(loss)


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(zeroengine.ZeroEngineError, match=r"raised in the middle of a step.*Call engine.zero_grad\(\)"):
        call()


def fail_between_micro_steps(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """In each step a backward fails once, after those of earlier micro-steps; the step is repeated from its start."""
    losses, norms = [], []
    for step in range(task.steps):
        numbers = range(step * task.micro_steps, (step + 1) * task.micro_steps)
        for number in numbers[:-1]:
            engine.backward(engine(*task.data(number, engine.rank)))
            engine.step()
        failing_backward(engine, 100, plain=step % 2 == 0)
        retried = engine(*task.data(numbers[-1], engine.rank))
        refused(partial(engine.backward, retried) if step < 2 else retried.backward)
        refused(engine.step)
        refused(engine.optimizer.step)
        assert engine.micro_steps == numbers[-1]
        engine.zero_grad()
        assert engine.micro_steps == numbers[0], "back at the start of the step"
        for number in numbers:
            loss = engine(*task.data(number, engine.rank))
            engine.backward(loss)
            losses.append(loss.item())
            updated = engine.step()
        assert updated
        norms.append(engine.grad_norm)
    return losses, norms


def test_a_backward_that_raised_does_not_halve_the_gradient_of_its_step() -> None:
    task = Task(micro_steps=3)
    by_pairs(task, fail_between_micro_steps, train_plainly(task))


class FailingBelowCheckpoints(TinyLM):
    """A backward fails after the backwards of checkpoints within it have ended."""

    fails = False

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = Failing.apply(self.tok(ids)) if self.fails else self.tok(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def try_again() -> None:
    start()
    engine = make_engine(Task(factory=FailingBelowCheckpoints), 1)
    engine.module.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        engine(*batch(0, engine.rank)).backward()
    engine.module.fails = False
    engine(*batch(0, engine.rank)).backward()
    assert engine.step()


def test_the_first_backward_of_a_step_may_be_tried_again_also_with_checkpoints() -> None:
    run_ranks(1, try_again)


def fail_second_loss(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """The second of two backwards of a micro-step fails, is caught, and step() is called all the same."""
    losses, norms = [], []
    for step in range(task.steps):
        engine.backward(engine(*task.data(step, engine.rank)))
        failing_backward(engine, 100, plain=step % 2 == 0)
        refused(engine.step)
        refused(engine.optimizer.step)
        engine.zero_grad()
        loss = engine(*task.data(step, engine.rank))
        engine.backward(loss)
        assert engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    return losses, norms


def test_a_step_after_a_caught_error_does_not_use_part_of_the_gradients() -> None:
    check_every_stage(Task(), loop=fail_second_loss)


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
