"""Steps whose loss or norm is far from the usual change nothing, on all ranks and at every stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroengine
from tests.distributed.models import batch
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STAGES, Task, make_engine, start
from zeroengine.config import load
from zeroengine.errors import ConfigError, SkippedStepsError, ZeroEngineError

SECTION = {"sigma": 6, "window": 8, "at_most": 3}
State = dict[str, torch.Tensor]


def take_step(engine: zeroengine.Engine, number: int, factor: float = 1.0) -> bool:
    """Take a step, whose loss is multiplied on rank 1."""
    loss = engine(*batch(number, engine.rank))
    engine.backward(loss * (factor if engine.rank == 1 else 1))
    return bool(engine.step())


def skip_one(stages: Sequence[int], more: dict[str, Any]) -> list[tuple[list[bool], State, State]]:
    """Train with an outlier in step 6, and the same without that step."""
    start()
    found = []
    for stage in stages:
        engine = make_engine(Task(), stage, skip_steps=SECTION, **more)
        updated = [take_step(engine, number, 1e3 if number == 6 else 1) for number in range(10)]
        assert engine.skipped_steps == updated.count(False) and engine.global_steps == updated.count(True)
        state = engine.full_state_dict()
        engine.close()
        other = make_engine(Task(), stage, **more)
        for number in (0, 1, 2, 3, 4, 5, 7, 8, 9):
            take_step(other, number)
        found.append((updated, state, other.full_state_dict()))
        other.close()
    return found


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_an_outlier_changes_nothing_on_any_rank(more: dict[str, Any]) -> None:
    for ranks in run_ranks(2, skip_one, STAGES, more):
        for updated, state, without in ranks:
            assert updated == [True] * 6 + [False] + [True] * 3
            for name, value in state.items():
                assert torch.equal(value, without[name]), name


def end_by_outliers(folder: Path) -> tuple[list[bool], str, list[bool], bool]:
    start()
    updated, message = [], ""
    engine = make_engine(Task(), 3, skip_steps=SECTION, checkpoint={"directory": str(folder)})
    try:
        for number in range(20):
            updated.append(take_step(engine, number, 1e3 if number >= 6 else 1))
    except SkippedStepsError as error:
        message = str(error)
    last_good = engine.full_state_dict()
    # A load begins to count anew.
    engine.load_checkpoint(folder)
    assert take_step(engine, 6)
    engine.close()
    # The window is that of the checkpoint, also at another stage: the first step after it is judged.
    resumed = make_engine(Task(), 1, skip_steps=SECTION)
    resumed.load_checkpoint(folder)
    same = all(torch.equal(value, last_good[name]) for name, value in resumed.full_state_dict().items())
    after = [take_step(resumed, 6, 1e3), take_step(resumed, 7)]
    resumed.close()
    return updated, message, after, same


def test_many_outliers_end_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    for updated, message, after, same in run_ranks(2, end_by_outliers, tmp_path):
        assert updated == [True] * 6 + [False] * 2
        assert "3 steps in a row" in message and str(tmp_path) in message
        assert same and after == [False, True]


def end_by_infinity() -> tuple[list[bool], str]:
    start()
    engine = make_engine(Task(), 2, skip_steps=SECTION)
    updated = []
    with pytest.raises(SkippedStepsError) as raised:
        for number in range(9):
            updated.append(take_step(engine, number, math.inf if number >= 2 else 1))
    engine.close()
    return updated, str(raised.value)


def test_gradients_that_stay_infinite_end_the_run() -> None:
    for updated, message in run_ranks(2, end_by_infinity):
        assert updated == [True, True, False, False]
        assert '"checkpoint": {"directory": ...}' in message


def judge_by(of: list[str]) -> list[bool]:
    """Add a constant to the loss in one step, which changes no gradient."""
    start()
    engine = make_engine(Task(), 1, skip_steps=SECTION | {"of": of})
    updated = []
    for number in range(8):
        loss = engine(*batch(number, engine.rank))
        engine.backward(loss + (100 if number == 6 else 0), weight=number + 1 if engine.rank else 3)
        updated.append(bool(engine.step()))
    engine.close()
    return updated


def test_loss_and_norm_are_judged_apart() -> None:
    (by_loss, *_), (by_norm, *_) = run_ranks(2, judge_by, ["loss"]), run_ranks(2, judge_by, ["norm"])
    assert by_loss == [True] * 6 + [False, True] and all(by_norm)


def call_backward_itself() -> str:
    start()
    engine = make_engine(Task(), 1, skip_steps=SECTION)
    engine(*batch(0, engine.rank)).backward()
    with pytest.raises(ZeroEngineError) as raised:
        engine.step()
    engine.close()
    return str(raised.value)


def test_a_loss_that_is_not_known_is_an_error() -> None:
    (text,) = run_ranks(1, call_backward_itself)
    assert '"of": ["norm"]' in text


@pytest.mark.parametrize(
    "section, expected",
    [({"of": []}, "of"), ({"window": 1}, "window"), ({"of": ["norms"]}, "norm"), ({"sigma": 0}, "sigma")],
)
def test_a_section_that_cannot_be_is_refused(section: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load({"skip_steps": section})
