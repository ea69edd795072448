"""An update starts from values that were written into the low-precision copy, and leaves its own rounding alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import instruction_set
from tests.ops.test_update import STATES, State, assert_same_bits
from zeroengine import ops
from zeroengine.ops import update

SIZES = [0, 1, 31, 32, 33, 257, 4099]
LOW = [torch.bfloat16, torch.float16]
EDGES = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -6e-8, 3e38, 1.0]


def between(low: torch.dtype) -> tuple[Tensor, Tensor]:
    """float32 values halfway between two neighbours in `low`, and next to that; and the neighbours, as bits."""
    codes = torch.tensor([0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x0001, 0x0002, 0x4200], dtype=torch.int32)
    lower = codes.to(torch.int16).view(low).float()
    upper = (codes + 1).to(torch.int16).view(low).float()
    middle = (lower + upper) / 2
    values = torch.cat([torch.nextafter(middle, lower), middle, torch.nextafter(middle, upper)])
    return values.repeat(2), torch.cat([codes.repeat(3), codes.repeat(3) + 1]).to(torch.int16)


def written(n: int, low: torch.dtype, moments: torch.dtype, skew: int, rule: str = "adamw") -> tuple[State, State]:
    """A state whose copy was written here and there, and one that holds those values in its parameter."""
    state, expected = (State(n, torch.bfloat16, low, moments, skew, seed=n, rule=rule) for _ in range(2))
    assert state.copy is not None and expected.copy is not None
    generator = torch.Generator().manual_seed(n)
    halfway, neighbours = between(low)
    ties = min(n, len(halfway))
    state.param[:ties] = halfway[:ties]
    state.copy.copy_(state.param)
    state.copy.view(torch.int16)[:ties] = neighbours[:ties]
    places = torch.randperm(n, generator=generator)[: n // 10]
    state.copy[places[1::2]] = torch.tensor(EDGES).to(low).repeat(n)[: len(places[1::2])]
    state.copy.view(torch.int16)[places[::2]] ^= 1
    rounded = state.param.to(low)
    differs = rounded.view(torch.int16) != state.copy.view(torch.int16)
    expected.param.copy_(torch.where(differs, state.copy.float(), state.param))
    return state, expected


@pytest.fixture(params=["avx512", "avx2", "portable", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "torch":
        monkeypatch.setattr(update, "library", lambda: None)
        yield request.param
        return
    with instruction_set(request.param):
        yield request.param


@pytest.mark.parametrize("rule, moments", STATES)
@pytest.mark.parametrize("low", LOW)
def test_a_step_starts_from_what_was_written(kernels: str, low: torch.dtype, rule: str, moments: torch.dtype) -> None:
    for i, n in enumerate(SIZES):
        state, expected = written(n, low, moments, 3 * (i % 2), rule)
        state.step(reload_written=True)
        expected.step()
        assert_same_bits(state, expected)


@pytest.mark.parametrize("low", LOW)
def test_a_large_buffer_whose_copy_is_streamed_reads_it_first(kernels: str, low: torch.dtype) -> None:
    state, expected = written((1 << 21) + 1037, low, torch.float32, 5)
    state.step(reload_written=True)
    expected.step()
    assert_same_bits(state, expected)


@pytest.mark.parametrize("low", LOW)
def test_a_copy_that_nobody_wrote_changes_no_bit(kernels: str, low: torch.dtype) -> None:
    state, expected = (State(4099, torch.bfloat16, low) for _ in range(2))
    for other in (state, expected):
        assert other.copy is not None
        other.param[:9] = torch.tensor(EDGES)
        other.param[9:51] = between(low)[0]
        other.step(step=1)  # rounds into the copy
    for step in range(2, 9):
        state.step(step=step, reload_written=True)
        expected.step(step=step)
    assert_same_bits(state, expected)


@pytest.mark.parametrize("low", LOW)
def test_reload_written_alone_does_what_the_step_does(low: torch.dtype) -> None:
    state, expected = written(70001, low, torch.float32, 0)
    assert state.copy is not None
    ops.reload_written(state.param, state.copy)
    assert torch.equal(state.param.view(torch.int32), expected.param.view(torch.int32))
