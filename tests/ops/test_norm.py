"""The squared norm is exact to float64's rounding, the same on any number of threads, and an overflow test."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zeroengine import ops
from zeroengine.ops import norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


def values(n: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    x = torch.randn(n + offset, generator=torch.Generator().manual_seed(n))
    return x.to(dtype)[offset:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 31, 33, 255, 257, 32767, 32769, 300001])
def test_the_squared_norm_matches_an_exact_sum(isa: str, n: int, dtype: torch.dtype) -> None:
    x = values(n, dtype, offset=3)
    result = ops.squared_norm(x)
    assert result.shape == () and result.dtype == torch.float64
    assert result.item() == pytest.approx(math.fsum(x.double().square().tolist()), rel=1e-14, abs=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_instruction_sets_change_no_bit_of_the_norm(isa: str, dtype: torch.dtype) -> None:
    x = values(500009, dtype)
    threads, results = torch.get_num_threads(), set()
    try:
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            results.add(ops.squared_norm(x).item())
    finally:
        torch.set_num_threads(threads)
    ops.set_cpu_isa("portable")
    assert results == {ops.squared_norm(x).item()}


@per_isa
@given(
    n=st.integers(1, 600),
    where=st.integers(0, 10**6),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
    dtype=st.sampled_from(DTYPES),
)
def test_the_squared_norm_is_finite_exactly_if_every_element_is(
    isa: str, n: int, where: int, bad: float, dtype: torch.dtype
) -> None:
    x = torch.full((n,), torch.finfo(dtype).max, dtype=dtype)
    assert ops.squared_norm(x).isfinite()
    x[where % n] = bad
    assert not ops.squared_norm(x).isfinite()


def test_the_smallest_numbers_count_in_the_norm(isa: str) -> None:
    tiny = 2.0**-149
    assert ops.squared_norm(torch.full((100,), tiny)).item() == 100 * tiny * tiny


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_computes_the_norm_where_there_is_no_library(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(norm, "library", lambda: None)
    for n in (0, 1, 1000, 100003):
        x = values(n, dtype)
        assert ops.squared_norm(x).item() == pytest.approx(math.fsum(x.double().square().tolist()), rel=1e-14, abs=0)


def test_a_tensor_that_is_not_contiguous_is_refused_and_any_other_shape_is_taken() -> None:
    assert ops.squared_norm(torch.ones(3, 4)).item() == 12
    with pytest.raises(AssertionError):
        ops.squared_norm(torch.ones(3, dtype=torch.float64))
    with pytest.raises(AssertionError):
        ops.squared_norm(torch.ones(4)[::2])


def test_the_norm_of_the_same_tensors_follows_their_values_and_their_memory() -> None:
    """A state that was offloaded for a while has got other memory when it is back."""
    tensors = [torch.ones(3), torch.full((2,), 2.0, dtype=torch.bfloat16)]
    norms = ops.SquaredNorms(tensors)
    assert norms.sum().item() == 11
    tensors[0].fill_(3)
    assert norms.sum().item() == 35
    before = tensors[0].data_ptr()
    kept = torch.empty(0).set_(torch.full((3,), 4.0).untyped_storage())
    tensors[0].set_(kept.untyped_storage(), 0, (3,))
    assert tensors[0].data_ptr() != before and norms.sum().item() == 56
