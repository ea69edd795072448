"""Moments in 8 bits: what a code can hold, and that rounding is right on average."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import instruction_set
from zeroengine import ops
from zeroengine.ops import MOMENT_BLOCK, UpdateArrays, update

SIGNS = [True, False]
SIGMAS = 5  # one test in 10**6 errs


@pytest.fixture(params=["avx512", "avx2", "portable", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "torch":
        monkeypatch.setattr(update, "library", lambda: None)
        yield
        return
    with instruction_set(request.param):
        yield


def encoded(values: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    codes = torch.zeros(values.numel(), dtype=torch.uint8)
    scales = torch.zeros(-(-values.numel() // MOMENT_BLOCK))
    ops.encode_moment(values, codes, scales, is_signed=is_signed)
    return codes, scales


def decoded(values: Tensor, is_signed: bool) -> Tensor:
    return ops.decode_moment(*encoded(values, is_signed), is_signed=is_signed)


def spread(n: int, is_signed: bool) -> Tensor:
    """Values over eight powers of ten."""
    generator = torch.Generator().manual_seed(n)
    values = torch.exp(torch.rand(n, generator=generator) * -18)
    return values * torch.randn(n, generator=generator).sign() if is_signed else values


def distances(values: Tensor, is_signed: bool) -> Tensor:
    """How far the neighbours of values up to 1 are from each other, where the scale is 1."""
    ranges = 7 if is_signed else 8
    distance = torch.full_like(values, 8.0 ** (1 - ranges))
    for k in range(1, ranges):
        top = 8.0 ** (k + 1 - ranges)
        distance[values.abs() > top / 8] = top * 7 / 8 / 2**k
    return distance


@pytest.mark.parametrize("is_signed", SIGNS)
def test_a_code_is_precise_near_the_largest_value_and_reaches_far_below_it(kernels: None, is_signed: bool) -> None:
    values = spread(1 << 16, is_signed)
    values[::MOMENT_BLOCK] = 1.0
    error, distance = (decoded(values, is_signed) - values).abs(), distances(values, is_signed)
    assert (error <= torch.where(distance > values.abs(), 1.0, 0.5001) * distance).all()
    largest = values.abs() > 1 / 8
    assert largest.any() and (error[largest] < (0.007 if is_signed else 0.0035)).all()
    # Six or seven powers of 8 below the largest value a sign is still there.
    assert (decoded(values, is_signed)[values.abs() > 8.0**-6] != 0).all()


@pytest.mark.parametrize("is_signed", SIGNS)
def test_codes_and_scales_stay_as_they_are_when_they_are_decoded_and_encoded(kernels: None, is_signed: bool) -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    if is_signed:
        # Numbers go from -127 to 127.
        codes[128] = 127
    scale = torch.tensor([3.7e-5])
    again, scales = encoded(ops.decode_moment(codes, scale, is_signed=is_signed), is_signed)
    assert torch.equal(again, codes) and torch.equal(scales, scale)


@pytest.mark.parametrize("is_signed", SIGNS)
def test_zeros_stay_zeros_and_small_values_without_a_sign_are_none(kernels: None, is_signed: bool) -> None:
    values = torch.zeros(3 * MOMENT_BLOCK + 5)
    assert torch.equal(decoded(values, is_signed), values)
    values[::MOMENT_BLOCK], values[1::MOMENT_BLOCK] = 1.0, 1e-30
    small = decoded(values, is_signed)[1::MOMENT_BLOCK]
    assert (small == 0).all() if is_signed else (small > 0).all()


@pytest.mark.parametrize("is_signed", SIGNS)
def test_infinities_and_nan_become_finite_and_spare_other_blocks(kernels: None, is_signed: bool) -> None:
    values = spread(3 * MOMENT_BLOCK, is_signed)
    clean = decoded(values, is_signed)
    values[MOMENT_BLOCK + 7 : MOMENT_BLOCK + 10] = torch.tensor([math.inf, -math.inf if is_signed else 1.0, math.nan])
    got = decoded(values, is_signed)
    assert got.isfinite().all() and got[MOMENT_BLOCK + 7] == torch.finfo(torch.float32).max
    others = torch.ones(3 * MOMENT_BLOCK, dtype=torch.bool)
    others[MOMENT_BLOCK : 2 * MOMENT_BLOCK] = False
    assert torch.equal(got[others], clean[others])


def test_all_kernels_give_the_same_codes(kernels: None) -> None:
    tiny = torch.full((MOMENT_BLOCK,), 1e-42)
    for is_signed in SIGNS:
        values = torch.cat([spread(5000, is_signed), tiny, torch.full((9,), 3e38)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(update, "library", lambda: None)
            want = encoded(values, is_signed)
        for got, expected in zip(encoded(values, is_signed), want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("rule, is_signed", [("momentum_sgd", True), ("adagrad", False)])
def test_the_mean_of_a_moment_is_its_value(kernels: None, rule: str, is_signed: bool) -> None:
    """Of each element of a block over many blocks, which are rounded independently."""
    blocks = 2000
    values = spread(MOMENT_BLOCK, is_signed)
    # The smallest numbers without a sign are rounded up.
    values = values.sign() * values.abs().clamp(min=0.0 if is_signed else 8.0**-7 * 1.01)
    values[0] = 1.0
    codes, scales = (torch.zeros(blocks * MOMENT_BLOCK, dtype=torch.uint8), torch.zeros(blocks))
    # From zero, the moment becomes the gradient, or its square.
    grad = (values if is_signed else values.sqrt()).repeat(blocks)
    arrays = UpdateArrays(torch.zeros_like(grad), grad, (codes,), (scales,))
    ops.update_step(rule, arrays, step=1, lr=1e-3, beta1=0.9, eps=1e-8)
    got = ops.decode_moment(codes, scales, is_signed=is_signed).view(blocks, MOMENT_BLOCK).double()
    bound = SIGMAS * 0.5 / math.sqrt(blocks) * distances(values, is_signed)
    assert ((got.mean(0) - values).abs() <= bound + 3e-7 * values.abs()).all()
    assert got.unique(dim=0).shape[0] == blocks


@pytest.mark.parametrize("grad, start", [(0.0, 1.0), (1.0, 0.0)])
def test_moments_move_by_less_than_half_a_distance(grad: float, start: float) -> None:
    """They decay, or grow, as in float32; rounded to nearest they would stall."""
    n, steps, beta = 16 * MOMENT_BLOCK, 500, 0.999
    # One element holds the scale.
    grads, param = torch.full((n,), grad), torch.zeros(n)
    values = torch.full((n,), start)
    grads[::MOMENT_BLOCK], values[::MOMENT_BLOCK] = 4.0, 4.0
    codes, scales = encoded(values, True)
    for step in range(2, steps + 2):
        arrays = UpdateArrays(param, grads, (codes,), (scales,))
        ops.update_step("momentum_sgd", arrays, step=step, lr=0.0, beta1=beta, beta2=beta, seed=step)
    got = ops.decode_moment(codes, scales, is_signed=True).double().view(-1, MOMENT_BLOCK)[:, 1:]
    want = grad + (start - grad) * beta**steps
    assert abs(got.mean().item() - want) < SIGMAS * got.std().item() / math.sqrt(got.numel()) < 0.02 * want
