"""fp16: a scaled loss, steps that overflow, and gradients that are divided before they are summed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_accumulation import Penalised, features
from tests.distributed.test_mixed_precision import Slope
from tests.distributed.training import (
    STAGES,
    Task,
    adamw,
    assert_close,
    assert_same_bits,
    make_engine,
    ordinary_loop,
    settings,
    start,
    train_at,
    train_plainly,
)
from tests.distributed.whole_states import whole_states
from tests.parametrization import TRANSPORTS
from zeroengine import ZeroEngineError
from zeroengine.config import FP16
from zeroengine.optim.loss_scaler import LossScaler

EVERY_STAGE = (0, 1, 2, 3)  # of which two each have the same bits with several micro-steps


def fp16(**section: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **section}}


def scaled_by_hand(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """``engine.scale(loss).backward()``, now of the whole loss, now of its parts."""
    losses, norms = [], []
    for micro_step in range(task.steps * task.micro_steps):
        loss = engine(*task.data(micro_step, engine.rank))
        if micro_step % 2:
            (engine.scale(loss / 2) + engine.scale(loss / 2)).backward()
        else:
            engine.scale(loss).backward()
        if engine.step():
            norms.append(engine.grad_norm)
        losses.append(loss.item())
    return losses, norms


# -- training -----------------------------------------------------------------------------------------


class Checkpointed(TinyLM):
    """All but the embedding runs in one reentrant checkpoint: the first gradients are of a backward within."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.after, self.tok(ids), labels, use_reentrant=True)

    def after(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


CHECKPOINTED = Task(factory=lambda: Checkpointed(tied=False))


def within_backwards() -> list[list[Any]]:
    found = [
        train_at(STAGES, CHECKPOINTED, loop, fp16(initial_scale_power=10)) for loop in (ordinary_loop, scaled_by_hand)
    ]
    return [*found, train_at(STAGES, Task(factory=Penalised, data=features), scaled_by_hand, fp16(loss_scale=8))]


def test_a_scaled_loss_may_have_reentrant_checkpoints_and_gradients_in_it() -> None:
    for usual, by_hand, penalised in run_ranks(2, within_backwards):
        for number, stage in enumerate(STAGES):
            assert_same_bits(penalised[0], penalised[number], stage)
            assert_same_bits(usual[0], usual[number], stage)
            assert by_hand[number].losses == pytest.approx(usual[0].losses, rel=1e-3)
            assert by_hand[number].norms == pytest.approx(usual[0].norms, rel=1e-2)


def in_fp16(stages: tuple[int, ...]) -> list[dict[int, Any]]:
    loops = (ordinary_loop, scaled_by_hand)
    found = [train_at(stages, Task(), loop, fp16(initial_scale_power=10)) for loop in loops]
    found.append(train_at(stages, Task(micro_steps=3), ordinary_loop, fp16(loss_scale=1024)))
    return [dict(zip(stages, trained, strict=True)) for trained in found]


@pytest.mark.parametrize("stages", [(0, 2, 3), pytest.param(EVERY_STAGE, marks=pytest.mark.slow)], ids=str)
def test_fp16_trains_as_fp32_does_within_its_rounding(stages: tuple[int, ...]) -> None:
    ranks = run_ranks(2, in_fp16, stages)
    for i, task in enumerate((Task(), Task(), Task(micro_steps=3))):
        for stage in stages:
            trained = [found[i][stage] for found in ranks]
            assert {value.dtype for value in trained[0].state.values()} == {torch.float16}
            widened = [copy.copy(one) for one in trained]
            for one in widened:
                object.__setattr__(one, "state", {name: value.float() for name, value in one.state.items()})
            assert_close(widened, train_plainly(task), tolerance=2e-3)
    for usual, by_hand, accumulated in ranks:
        for stage in stages:
            assert_same_bits(usual[0], usual[stage], stage)
            assert_same_bits(usual[stage], by_hand[stage], "engine.scale(loss).backward() is engine.backward(loss)")
            assert_same_bits(accumulated[stage // 2 * 2], accumulated[stage], stage)


class Faint(Slope):
    """Its gradient is 1e-8, below what fp16 can hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float() * 1e-8


def large_steps(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e6)


def faint() -> list[list[float]]:
    start()
    found = []
    for section in ({}, {"loss_scale": 1}, {"loss_scale": 4096}):
        for stage in (0, 3):
            engine = make_engine(Task(factory=Faint, optimizer=large_steps, clip=0), stage, **fp16(**section))
            engine.backward(engine(torch.ones(700)))
            engine.step()
            found.append(sorted(set(engine.full_state_dict()["weight"].tolist())))
    return found


def test_gradients_below_fp16_s_range_count() -> None:
    moved = pytest.approx([0.99], abs=1e-3)
    assert run_ranks(2, faint)[0] == [moved, moved, [1.0], [1.0], moved, moved]


def unscaled_after_a_failure() -> None:
    start()
    engine = make_engine(Task(), 1, **fp16())
    for name in ("norm.weight", "blocks.0.norm.weight"):  # before and after other parameters have a gradient
        handle = engine.module.get_parameter(name).register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.scale(engine(*batch(0, engine.rank))).backward()
        handle.remove()
        # Loops that catch torch's errors of backward catch this one, too.
        with pytest.raises(RuntimeError, match="Loss scaling is required in fp16"):
            engine(*batch(0, engine.rank)).backward()


def unscaled_after_a_scaled_one() -> None:
    start()
    engine = make_engine(Task(), 1, **fp16())
    losses = [engine(*batch(step, engine.rank)) for step in range(2)]
    engine.scale(losses[0]).backward()
    with pytest.raises(RuntimeError, match="Loss scaling is required in fp16"):
        losses[1].backward()


def test_a_scaled_loss_lets_no_other_one_pass_unscaled() -> None:
    run_ranks(1, unscaled_after_a_scaled_one)


def test_a_scaled_backward_that_raised_lets_no_unscaled_one_pass() -> None:
    run_ranks(1, unscaled_after_a_failure)


# -- overflow -----------------------------------------------------------------------------------------


class Poison:
    """Makes the gradient of one parameter not finite, on rank 1, on demand."""

    value = 1.0


def poisoned_task(name: str) -> Task:
    def factory() -> nn.Module:
        model = Task().factory()
        model.get_parameter(name).register_hook(lambda grad: grad * Poison.value)
        return model

    return Task(factory=factory)


def poisoned_step(engine: zeroengine.Engine, step: int, value: float) -> bool:
    Poison.value = value if engine.rank == 1 else 1.0
    engine.backward(engine(*batch(step, engine.rank)))
    Poison.value = 1.0
    return engine.step()


def everything(engine: zeroengine.Engine) -> dict[str, Any]:
    """All that a step may change."""
    found: dict[str, Any] = {f"value of {name}": value for name, value in engine.full_state_dict().items()}
    found |= whole_states(engine)
    assert engine.lr_scheduler is not None
    found["schedule"] = (engine.lr_scheduler.state_dict()["last_epoch"], engine.lr_scheduler.get_last_lr())
    return found | {"rate": engine.optimizer.param_groups[0]["lr"], "steps": engine.global_steps}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    def same(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other

    return [name for name, value in before.items() if not same(value, after[name])]


def decaying(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.9**step)


def overflows(stages: Sequence[int]) -> list[tuple[Any, ...]]:
    start()
    task = poisoned_task("blocks.1.down.weight")
    found = []
    for stage in stages:
        model = build(task.factory)
        more = fp16(initial_scale_power=10, hysteresis=2)
        engine = zeroengine.initialize(model, adamw(model), settings(task, stage, **more), lr_scheduler=decaying)
        assert poisoned_step(engine, 0, 1.0)
        before = everything(engine)
        scales = [engine.loss_scale]
        for value in (float("inf"), float("nan"), -float("inf")):
            assert not poisoned_step(engine, 1, value)
            scales.append(engine.loss_scale)
        changed, skipped = differences(before, everything(engine)), engine.skipped_steps
        assert poisoned_step(engine, 1, 1.0)
        found.append((scales, changed, skipped, len(differences(before, everything(engine))) == len(before)))
        engine.close()
    return found


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(stages: tuple[int, ...]) -> None:
    for ranks in run_ranks(2, overflows, stages):
        for scales, changed, skipped, all_move_afterwards in ranks:
            assert scales == [1024, 1024, 512, 256]
            assert changed == [] and skipped == 3
            assert all_move_afterwards


def falls_and_grows() -> list[tuple[list[bool], list[float], int]]:
    start()
    found = []
    for stage in (0, 3):
        more = fp16(initial_scale_power=26, hysteresis=1, loss_scale_window=2)
        engine = make_engine(Task(micro_steps=2), stage, **more)
        steps, scales = [], []
        for step in range(32):
            engine.backward(engine(*batch(step, engine.rank)))
            updated = engine.step()
            if step % 2:
                steps.append(updated)
                scales.append(engine.loss_scale)
        found.append((steps, scales, engine.global_steps))
    return found


def test_the_scale_falls_until_gradients_fit_and_grows_again() -> None:
    """With accumulation: steps count, not micro-steps."""
    first, second = run_ranks(2, falls_and_grows)
    assert first == second, "the same on all ranks"
    for steps, scales, updates in first:
        scaler = LossScaler(FP16(initial_scale_power=26, hysteresis=1, loss_scale_window=2))
        for updated, scale in zip(steps, scales, strict=True):
            scaler.update(not updated)
            assert scaler.scale == scale
        assert not steps[0] and updates == sum(steps) > 3, "2**26 is beyond fp16, and some scale is not"
        assert any(later > earlier for earlier, later in pairwise(scales))


def exhausted() -> list[tuple[str, list[str], bool, int]]:
    start()
    found = []
    for stage in STAGES:
        # Where gradients are partitioned, rank 0 has no part of this one.
        task = poisoned_task("blocks.1.down.bias")
        model = build(task.factory)
        more = fp16(initial_scale_power=3, min_loss_scale=4, hysteresis=1)
        engine = zeroengine.initialize(model, adamw(model), settings(task, stage, **more), lr_scheduler=decaying)
        assert not poisoned_step(engine, 0, float("inf")) and engine.loss_scale == 4
        before = everything(engine)
        with pytest.raises(ZeroEngineError) as error:
            poisoned_step(engine, 0, float("nan"))
        changed = differences(before, everything(engine))
        found.append((str(error.value), changed, poisoned_step(engine, 0, 1.0), engine.loss_scale))
    return found


def test_an_overflow_at_the_smallest_scale_is_an_error_on_every_rank_that_names_the_parameter() -> None:
    for ranks in run_ranks(2, exhausted):
        for message, changed, trains_on, scale in ranks:
            assert message.startswith(
                "step 2: the gradient of blocks.1.down.bias is not finite, at the smallest loss scale, 4 "
                "(fp16.min_loss_scale)."
            )
            assert "lower the learning rate" in message and "bf16" in message
            assert changed == [] and trains_on and scale == 4


def static_scale() -> tuple[list[bool], float, int]:
    start()
    engine = make_engine(poisoned_task("norm.weight"), 2, **fp16(loss_scale=256))
    steps = [poisoned_step(engine, 0, value) for value in (float("inf"), float("inf"), 1.0)]
    engine.loss_scale = 512
    steps.append(poisoned_step(engine, 0, 1.0))
    return steps, engine.loss_scale, engine.skipped_steps


def test_a_static_scale_skips_and_stays() -> None:
    assert run_ranks(2, static_scale) == 2 * [([False, False, True, True], 512.0, 2)]


# -- check_grad_overflow ------------------------------------------------------------------------------

NOT_FINITE = (float("inf"), float("nan"))
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


def unchecked() -> dict[Any, Any]:
    start()
    task = poisoned_task("norm.weight")
    found: dict[Any, Any] = {}
    for name, precision in PRECISIONS.items():
        for value in NOT_FINITE:
            for stage in STAGES:
                engine = make_engine(task, stage, check_grad_overflow=False, **precision)
                steps = (poisoned_step(engine, 0, 1.0), poisoned_step(engine, 1, value))
                found[name, str(value), stage] = (steps, engine.full_state_dict())
        engine = make_engine(task, 3, check_grad_overflow=True, **precision)
        found[name, "checked"] = (poisoned_step(engine, 0, 1.0), poisoned_step(engine, 1, float("nan")))
    return found


def plain_poisoned(value: float) -> dict[str, torch.Tensor]:
    model = build(poisoned_task("norm.weight").factory)
    optimizer = adamw(model)
    for step, poison in ((0, 1.0), (1, value)):
        for rank in (0, 1):
            Poison.value = poison if rank == 1 else 1.0
            (model(*batch(step, rank)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    Poison.value = 1.0
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_without_the_check_a_step_does_with_its_gradient_what_plain_pytorch_does() -> None:
    plain = {str(value): plain_poisoned(value) for value in NOT_FINITE}
    assert not plain["inf"]["norm.weight"].isfinite().any() and plain["inf"]["tok.weight"].isfinite().all()
    assert not plain["nan"]["tok.weight"].isfinite().any(), "the clip factor is nan, and so is every gradient"
    for found in run_ranks(2, unchecked):
        for name in PRECISIONS:
            assert found.pop((name, "checked")) == (True, False)
        for (name, value, _), (steps, state) in found.items():
            assert steps == (True, True)
            for key, tensor in state.items():
                tolerance = {"rtol": 1e-4, "atol": 1e-5} if name == "fp32" else {"rtol": 2e-2, "atol": 2e-2}
                torch.testing.assert_close(tensor.float(), plain[value][key], equal_nan=True, **tolerance)


# -- dividing before the sum --------------------------------------------------------------------------

DIVIDED: list[dict[str, Any]] = [
    {},
    {"prescale_gradients": True},
    {"gradient_predivide_factor": 8.0},
    {"gradient_predivide_factor": 3.0},
]


def mixed(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """The second of every three micro-steps stays on the rank."""
    losses, norms = [], []
    for micro_step in range(task.steps * task.micro_steps):
        loss = engine(*task.data(micro_step, engine.rank))
        if micro_step % 3 == 1:
            with engine.no_sync():
                engine.backward(loss)
        else:
            engine.backward(loss)
        if engine.step():
            norms.append(engine.grad_norm)
        losses.append(loss.item())
    return losses, norms


def divided(transport: str) -> list[Any]:
    task = Task(micro_steps=3, steps=2)
    return [train_at(STAGES, task, mixed, more | {"comm": {"transport": transport}}) for more in DIVIDED]


@pytest.mark.slow  # the test below divides first, and test_full_values predivides
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_dividing_gradients_before_their_sum_changes_no_number(transport: str) -> None:
    ranks = run_ranks(2, divided, transport)
    for usual, prescaled, by_eight, by_three in ranks:
        for number, stage in enumerate(STAGES):
            assert_same_bits(usual[number], prescaled[number], stage)
            assert_same_bits(usual[number], by_eight[number], stage)
            assert by_three[number].losses == pytest.approx(usual[number].losses, rel=1e-5)
    for number in (0, -1):
        for i in range(len(DIVIDED)):
            assert_close([found[i][number] for found in ranks], train_plainly(Task(micro_steps=3, steps=2)))


def large_sums() -> list[bool]:
    start()
    found = []
    for more in ({}, {"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}):
        for stage in STAGES:
            task = Task(factory=Slope, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
            engine = make_engine(task, stage, **fp16(loss_scale=40000), **more)
            engine.backward(engine(torch.ones(700)))
            found.append(engine.step())
    return found


def test_sums_beyond_fp16_fit_where_gradients_are_divided_first() -> None:
    """40,000 from each of two ranks."""
    assert run_ranks(2, large_sums)[0] == [False] * len(STAGES) + [True] * 2 * len(STAGES)
