"""The loss scale: static, and dynamic as DeepSpeed's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroengine import ZeroEngineError
from zeroengine.config import load
from zeroengine.optim.loss_scaler import LossScaler


def scaler(**section: Any) -> LossScaler:
    return LossScaler(load({"fp16": {"enabled": True, **section}}).fp16)


def trace(made: LossScaler, overflows: str) -> list[float]:
    """The scale after each step; ``x`` overflows."""
    found = []
    for step in overflows:
        made.update(step == "x")
        found.append(made.scale)
    return found


def test_a_static_scale_stays() -> None:
    made = scaler(loss_scale=128)
    assert trace(made, "..x.xxxx" + 2000 * ".") == [128.0] * 2008
    assert not made.exhausted, "its steps are skipped for ever, as the user wished"


def test_the_scale_starts_at_two_to_the_power() -> None:
    assert scaler().scale == 65536
    assert scaler(initial_scale_power=4).scale == 16
    assert scaler(initial_scale_power=0, min_loss_scale=8).scale == 8, "and never below the smallest"


# Of DeepSpeed 0.19.8's DynamicLossScaler; "!" is where it raises. With 2**4 to start and a smallest scale of 1.
TRACES = [
    ({"loss_scale_window": 3, "hysteresis": 1}, "x.......x....", [8, 8, 8, 8, 16, 16, 16, 32, 16, 16, 16, 16, 32]),
    ({"loss_scale_window": 1, "hysteresis": 1}, "..x...", [16, 32, 16, 16, 32, 64]),
    ({"loss_scale_window": 2, "hysteresis": 2}, "x.x.x...x.x", [16, 16, 8, 8, 4, 4, 4, 8, 8, 8, 4]),
    ({"loss_scale_window": 9, "hysteresis": 2}, "x.x.x", [16, 16, 8, 8, 4]),
    ({"loss_scale_window": 9, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx", [16, 16, 16, 16, 16, 8]),
    ({"loss_scale_window": 9, "hysteresis": 3}, "xxxxxxx!", [16, 16, 8, 4, 2, 1, None, None]),
    ({"loss_scale_window": 9, "hysteresis": 1, "min_loss_scale": 4}, "xx!", [8, 4, None]),
]


@pytest.mark.parametrize(("section", "overflows", "scales"), TRACES)
def test_a_dynamic_scale_moves_as_deepspeeds(section: dict[str, Any], overflows: str, scales: list[Any]) -> None:
    made = scaler(initial_scale_power=4, **section)
    for step, expected in zip(overflows, scales, strict=True):
        if expected is None:
            assert made.exhausted
            return
        assert not (step == "x" and made.exhausted)
        made.update(step == "x")
        assert made.scale == expected


@settings(deadline=None, max_examples=300)
@given(
    power=st.integers(0, 12),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    minimum_power=st.integers(-3, 4),
    overflows=st.lists(st.booleans(), max_size=60),
)
def test_any_sequence_of_overflows_gives_deepspeeds_scales(
    power: int, window: int, hysteresis: int, consecutive: bool, minimum_power: int, overflows: list[bool]
) -> None:
    module = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    minimum = min(2.0**minimum_power, 2.0**power)
    mine = scaler(
        initial_scale_power=power,
        loss_scale_window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_loss_scale=minimum,
    )
    theirs = module.DynamicLossScaler(2.0**power, window, minimum, hysteresis, consecutive)
    with mock.patch.object(module.dist, "get_rank", lambda: 1):  # whose rank 0 alone logs
        for overflow in overflows:
            if overflow and mine.exhausted:
                with pytest.raises(Exception, match="already at minimum"):
                    theirs.update_scale(True)
                return
            mine.update(overflow)
            theirs.update_scale(overflow)
            assert mine.scale == theirs.loss_scale


@given(st.lists(st.booleans(), max_size=40), st.lists(st.booleans(), max_size=40))
def test_a_scaler_continues_from_its_state_dict(before: list[bool], after: list[bool]) -> None:
    section = {"loss_scale_window": 3, "hysteresis": 2}
    first, second = scaler(**section), scaler(**section)
    for overflow in before:
        first.update(overflow)
    second.load_state_dict(first.state_dict())
    for overflow in after:
        first.update(overflow)
        second.update(overflow)
        assert second.state_dict() == first.state_dict()


def test_the_scale_grows_no_further_than_an_fp32_loss_can_carry() -> None:
    made = scaler(loss_scale_window=1, initial_scale_power=120)
    assert trace(made, 20 * ".")[-1] == 2.0**126


@pytest.mark.parametrize("scale", [0, -1, float("inf"), float("nan"), "1", None])
def test_a_scale_that_is_no_positive_number_is_refused(scale: Any) -> None:
    made = scaler(loss_scale=64)
    with pytest.raises(ZeroEngineError, match=r'loss_scale is a positive number, .* "fp16": {"loss_scale": 0\}'):
        made.set(scale)
    assert made.scale == 64


def test_a_scale_can_be_set_from_outside() -> None:
    made = scaler(min_loss_scale=4)
    made.set(32)
    assert trace(made, "xx") == [32, 16]
    with pytest.raises(ZeroEngineError, match=r"at least fp16.min_loss_scale, 4, found 2"):
        made.set(2)
    assert made.scale == 16
