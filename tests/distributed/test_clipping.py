"""Clipping that a training loop asks for, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zeroengine
from tests.distributed.models import batch, build
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.training import (
    STAGES,
    Task,
    Trained,
    adamw,
    assert_close,
    assert_same_bits,
    make_engine,
    settings,
    start,
    train_plainly,
)
from zeroengine import ZeroEngineError
from zeroengine.engine.initialize import make_engine as make_engine_on

LIMIT = 0.5


def by_the_loop(task: Task, engine: zeroengine.Engine, step: Callable[[], Any]) -> Trained:
    """``clip_grad_norm_`` before each update, ``step`` once a step."""
    losses, norms = [], []
    for micro_step in range(task.steps * task.micro_steps):
        loss = engine(*task.data(micro_step, engine.rank))
        engine.backward(loss)
        losses.append(loss.item())
        if (micro_step + 1) % task.micro_steps == 0:
            norm = engine.clip_grad_norm_(LIMIT)
            assert isinstance(norm, torch.Tensor) and norm.shape == () and norm.device == engine.device
            step()
            assert norm.item() == engine.grad_norm, "what step() finds"
            norms.append(norm.item())
    return Trained(losses, norms, engine.full_state_dict())


def clipped(on_device: bool | None) -> list[list[Trained]]:
    start()
    found = []
    for micro_steps in (1, 2):
        found.append([])
        for stage in STAGES:
            task = Task(steps=3, micro_steps=micro_steps, clip=0.0)
            model = build(task.factory)
            engine = make_engine_on(model, adamw(model), settings(task, stage), async_step=on_device)
            found[-1].append(by_the_loop(task, engine, engine.optimizer.step))
            engine.close()
    return found


@pytest.mark.parametrize("on_device", [None, True], ids=["", "issued"])
def test_clipping_in_the_loop_is_that_of_plain_pytorch(on_device: bool | None) -> None:
    ranks = run_ranks(2, clipped, on_device)
    for i, micro_steps in enumerate((1, 2)):
        plain = train_plainly(Task(steps=3, micro_steps=micro_steps, clip=LIMIT))
        assert min(plain.norms) > LIMIT, "every step is clipped"
        for number in range(len(STAGES)):
            assert_close([found[i][number] for found in ranks], plain)


def for_one_step() -> list[Trained]:
    """The same three steps with limits of LIMIT, none and LIMIT, asked for in different ways."""
    start()
    found = []

    def train(configured: float, before_step: Callable[[zeroengine.Engine, int], None]) -> None:
        task = Task(clip=configured)
        engine = make_engine(task, 2)
        losses = []
        for step in range(3):
            loss = engine(*batch(step, engine.rank))
            engine.backward(loss)
            before_step(engine, step)
            assert engine.step()
            losses.append(loss.item())
        found.append(Trained(losses, [], engine.full_state_dict()))
        engine.close()

    def armed(engine: zeroengine.Engine, step: int) -> None:
        if step != 1:
            assert engine.clip_grad_norm_(math.inf) == engine.clip_grad_norm_(LIMIT)
            engine.clip_grad_norm_(10 * LIMIT)  # the smallest counts, as if one clipped again and again

    def assigned(engine: zeroengine.Engine, step: int) -> None:
        engine.gradient_clipping = 0 if step == 1 else LIMIT
        assert engine.gradient_clipping == (0 if step == 1 else LIMIT)
        assert engine.config.gradient_clipping == 9.0

    def smaller_of_two(engine: zeroengine.Engine, step: int) -> None:
        if step == 1:
            engine.gradient_clipping = math.inf
        else:
            engine.gradient_clipping = LIMIT
            engine.clip_grad_norm_(20.0)

    train(0.0, armed)
    train(9.0, assigned)
    train(9.0, smaller_of_two)
    train(LIMIT, lambda engine, step: None)
    return found


def test_a_limit_holds_for_its_step_alone() -> None:
    for armed, assigned, smaller, always in run_ranks(2, for_one_step):
        assert_same_bits(armed, assigned)
        assert_same_bits(armed, smaller)
        assert armed.losses[:2] == always.losses[:2] and armed.losses[2] != always.losses[2]


def misuse() -> None:
    start()
    engine = make_engine(Task(micro_steps=2, clip=0.0), 3)
    with pytest.raises(ZeroEngineError, match=r"clip_grad_norm_\(\) without backward\(\)"):
        engine.clip_grad_norm_(1.0)
    engine.backward(engine(*batch(0, engine.rank)))
    with pytest.raises(ZeroEngineError, match=r"before the last backward of a step.*is_gradient_accumulation_boundary"):
        engine.clip_grad_norm_(1.0)
    engine.step()
    engine.backward(engine(*batch(1, engine.rank)))
    for wrong in (0, -1.0, float("nan"), "1", None):
        with pytest.raises(ZeroEngineError, match="max_norm is a number above 0, the largest norm; found"):
            engine.clip_grad_norm_(wrong)  # type: ignore[arg-type]
    with pytest.raises(ZeroEngineError, match="gradient_clipping is a number of at least 0"):
        engine.gradient_clipping = -1.0
    with engine.no_sync(), pytest.raises(ZeroEngineError, match=r"clip_grad_norm_\(\) inside `with engine.no_sync"):
        engine.clip_grad_norm_(1.0)
    engine.clip_grad_norm_(1.0)
    with pytest.raises(ZeroEngineError, match="clip after the last backward of a step"):
        engine.backward(engine(*batch(2, engine.rank)))
    assert engine.step(), "the refused backward has changed nothing"
    for number in (3, 4):
        engine.backward(engine(*batch(number, engine.rank)))
        if number == 3:
            assert not engine.step()
    engine.clip_grad_norm_(1.0)
    with pytest.raises(ZeroEngineError, match="clip after the last backward of a step"):
        engine(*batch(5, engine.rank)).backward()  # part of its gradients has come when it is refused
    with pytest.raises(ZeroEngineError, match=r"Call engine.zero_grad\(\)"):
        engine.step()
    engine.zero_grad()
    assert all(param.grad is None for param in engine.module.parameters())
    assert not engine.is_gradient_accumulation_boundary()


def test_clipping_at_the_wrong_place_is_refused_and_changes_nothing() -> None:
    run_ranks(2, misuse)


def differing() -> None:
    start()
    engine = make_engine(Task(clip=0.0), 1)
    engine.backward(engine(*batch(0, engine.rank)))
    engine.clip_grad_norm_(1.0 + engine.rank)
    engine.step()


def test_ranks_that_clip_to_different_norms_are_told() -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, differing)
    assert all(kind == "DivergenceError" for kind, _, _ in failed.value.failures.values())
    assert "norm to clip to 2" in str(failed.value)


def left_in_the_loop() -> None:
    start()
    for stage in STAGES:
        engine = make_engine(Task(), stage)
        for step in range(3):
            engine.module.zero_grad()
            with engine.no_sync():
                engine.backward(engine(*batch(step, engine.rank)))
            engine.backward(engine(*batch(step, engine.rank)))
            if step:
                with pytest.raises(ZeroEngineError, match=r"call engine\.clip_grad_norm_\(max_norm\)"):
                    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
            assert engine.step()
            engine.module.zero_grad()


def test_torchs_own_clipping_is_named_at_every_stage() -> None:
    run_ranks(2, left_in_the_loop)
