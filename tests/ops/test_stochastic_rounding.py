"""Moments, averages and parameters in bfloat16 are rounded up or down by chance, and right on average."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroengine import ops
from zeroengine.ops import UpdateArrays, update

LARGEST = torch.finfo(torch.bfloat16).max
HYPER: dict[str, Any] = dict(step=3, lr=1e-3, eps=1e-8, weight_decay=0.0)
SIGMAS = 5  # one test in 10**6 errs


@pytest.fixture(params=["kernel", "torch"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel, or torch in its stead."""
    if request.param == "torch":
        monkeypatch.setattr(update, "library", lambda: None)
    elif ops.library() is None:
        pytest.skip("zeroengine's CPU library was not built")
    yield


def step(
    grad: Tensor, exp_avg: Tensor | float, exp_avg_sq: Tensor | float, beta1: float, beta2: float, **more: Any
) -> tuple[Tensor, Tensor]:
    """New moments in bfloat16, of old ones that are rounded to it."""
    moments = [(torch.zeros_like(grad) + old).bfloat16() for old in (exp_avg, exp_avg_sq)]
    arrays = UpdateArrays(torch.zeros_like(grad), grad, tuple(moments))
    ops.update_step("adamw", arrays, beta1=beta1, beta2=beta2, **{**HYPER, **more})
    return moments[0], moments[1]


def unrounded(grad: float, exp_avg: float, exp_avg_sq: float, beta1: float, beta2: float) -> tuple[float, float]:
    """The same in float32, of one element."""
    moments = [torch.tensor([x]) for x in (exp_avg, exp_avg_sq)]
    arrays = UpdateArrays(torch.zeros(1), torch.tensor([grad]), tuple(moments))
    ops.update_step("adamw", arrays, beta1=beta1, beta2=beta2, **HYPER)
    return moments[0].item(), moments[1].item()


def check_mean(rounded: Tensor, exact: float) -> None:
    """Whether ``rounded`` holds the neighbours of ``exact``, in the proportion that makes the mean right."""
    values = rounded.double()
    low, high = values.min().item(), values.max().item()
    assert low <= exact <= high and rounded.unique().numel() <= 2
    spacing = 2.0 ** max(math.frexp(exact)[1] - 8, -133)  # which is that of subnormal numbers
    share = math.fmod(abs(exact), spacing) / spacing  # of those that go away from zero
    assert low == high or high - low == spacing
    bound = SIGMAS * math.sqrt(share * (1 - share) / values.numel()) + 1 / values.numel()
    assert abs(values.mean().item() - exact) <= bound * spacing


# Gradient, exp_avg and exp_avg_sq.
CASES = [(0.7, 1.0, 2.0), (-0.31, -1.75, 2**-10), (1e-3, 0.5, 0.25), (12.3, -(2**-12), 0.0), (3e-20, 2**-70, 2**-127)]


@pytest.mark.parametrize("case", CASES)
def test_the_mean_over_elements_is_the_value(either: None, case: tuple[float, float, float]) -> None:
    grad, *old = case
    for rounded, value in zip(
        step(torch.full((1 << 17,), grad), *old, 0.9, 0.95), unrounded(*case, 0.9, 0.95), strict=True
    ):
        check_mean(rounded, value)


@pytest.mark.parametrize("rule", ["sgd", "average_only"])
def test_the_means_of_parameters_and_averages_are_their_values(either: None, rule: str) -> None:
    """Both in one pass, and independently."""
    n = 1 << 17
    param, average = torch.full((n,), 1.5).bfloat16(), torch.full((n,), -0.75).bfloat16()
    grad = None if rule == "average_only" else torch.full((n,), 0.7)
    arrays = UpdateArrays(param, grad, average=average)
    ops.update_step(rule, arrays, step=1, lr=1e-3, average_weight=1e-3)
    exact = 1.5 if grad is None else 1.5 - 1e-3 * 0.7
    check_mean(param, torch.tensor(exact).item())
    check_mean(average, -0.75 + 1e-3 * (exact + 0.75))
    if grad is not None:
        up = [(x == x.max()).double() for x in (param, average)]
        assert abs(torch.corrcoef(torch.stack(up))[0, 1].item()) < SIGMAS / math.sqrt(n)


def test_the_mean_over_steps_is_the_value() -> None:
    grad, *old = CASES[0]
    for offset in (0, 10**6, 10**12):
        found = [step(torch.tensor([grad]), *old, 0.9, 0.95, seed=seed, offset=offset) for seed in range(4000)]
        for rounded, value in zip(zip(*found, strict=True), unrounded(*CASES[0], 0.9, 0.95), strict=True):
            check_mean(torch.cat(rounded), value)


def test_neighbours_steps_and_moments_are_rounded_independently() -> None:
    n = 1 << 17
    first, second = (step(torch.full((n,), 0.7), 1.0, 2.0, 0.9, 0.95, seed=seed) for seed in (8, 9))
    up = [(x == x.max()).double() for x in (*first, *second)]
    pairs = [(up[i], up[j]) for i in range(4) for j in range(i)]
    pairs += [(x[:-lag], x[lag:]) for x in up for lag in (1, 2, 8, 32, 4096, 1 << 16)]
    for a, b in pairs:
        correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
        assert abs(correlation) < SIGMAS / math.sqrt(a.numel())


def test_values_that_bfloat16_can_hold_stay(either: None) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    for seed in range(4):
        exp_avg, _ = step(every.float(), 0.0, 0.0, 0.0, 0.5, seed=seed)
        assert torch.equal(exp_avg, every)
        powers = torch.exp2(torch.arange(-60.0, 60.0))
        assert torch.equal(step(powers, 0.0, 0.0, 0.5, 0.0, seed=seed)[1], powers.square().bfloat16())
        for moment in step(torch.zeros(4099), 0.0, 0.0, 0.9, 0.95, seed=seed):
            assert torch.equal(moment, torch.zeros_like(moment))


def test_no_finite_value_overflows_and_no_square_turns_negative(either: None) -> None:
    n = 4099
    largest = torch.tensor(LARGEST, dtype=torch.bfloat16)
    for seed in range(3):
        past = 1.8446e19  # its square lies between the largest bfloat16 and the largest float32
        assert (step(torch.full((n,), past), 0.0, 0.0, 0.9, 0.0, seed=seed)[1] == largest).all()
        for sign in (1, -1):
            most = torch.full((n,), sign * torch.finfo(torch.float32).max)
            assert (step(most, 0.0, 0.0, 0.0, 0.95, seed=seed)[0] == sign * largest).all()
        below = step(torch.zeros(n), LARGEST, LARGEST, 1 - 2.0**-12, 1 - 2.0**-12, seed=seed)
        assert all(moment.isfinite().all() and moment.unique().numel() == 2 for moment in below)
        assert (step(torch.randn(n) * 1e-19, 0.0, 0.0, 0.9, 0.95, seed=seed)[1] >= 0).all()


def test_infinity_and_nan_stay() -> None:
    bad = torch.tensor([math.inf, -math.inf, math.nan, -math.nan]).repeat(100)
    bad = torch.cat([bad, torch.tensor([-1, 2**31 - 1], dtype=torch.int32).view(torch.float32)])  # NaN, all bits set
    exp_avg, exp_avg_sq = step(bad, 0.1, 0.1, 0.9, 0.95)
    for moment, want in ((exp_avg, bad), (exp_avg_sq, bad.square())):
        assert torch.equal(moment.isnan(), bad.isnan())
        assert torch.equal(moment[~bad.isnan()].float(), want[~bad.isnan()])


def test_torch_takes_the_random_bits_of_the_kernel(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    generator = torch.Generator().manual_seed(0)
    grad, exp_avg, exp_avg_sq = (torch.randn(100_003, generator=generator) for _ in range(3))
    for seed, offset in ((0, 0), (2**63 - 1, 2**32 - 50_000), (77 << 32 | 5, 2**60 + 12345)):
        arguments = (grad, exp_avg, exp_avg_sq.square(), 0.9, 0.95)
        kernel = step(*arguments, seed=seed, offset=offset)
        with monkeypatch.context() as patch:
            patch.setattr(update, "library", lambda: None)
            for ours, theirs in zip(kernel, step(*arguments, seed=seed, offset=offset), strict=True):
                assert (ours != theirs).double().mean() < 1e-3  # where float32's last bit differs


@pytest.mark.parametrize("grad, start", [(0.0, 1.0), (1.0, 0.0)])
def test_moments_move_by_less_than_half_a_unit_in_the_last_place(grad: float, start: float) -> None:
    """They decay to the gradient, or grow towards it, as in float32; rounded to nearest they would stall."""
    n, steps, beta = 4096, 1000, 0.999
    want = grad + (start - grad) * beta**steps
    grads, param = torch.full((n,), grad), torch.zeros(n)
    moments = [torch.full((n,), start, dtype=torch.bfloat16) for _ in range(2)]
    nearest = torch.tensor(start, dtype=torch.bfloat16)
    for seed in range(steps):
        arrays = UpdateArrays(param, grads, tuple(moments))
        ops.update_step("adamw", arrays, beta1=beta, beta2=beta, seed=seed, **HYPER)
        nearest = (nearest.float() + (1 - beta) * (grad - nearest.float())).bfloat16()
    for moment in moments:
        error = abs(moment.double().mean().item() - want)
        assert error < SIGMAS * moment.double().std().item() / math.sqrt(n) < 0.02 * want
    assert abs(nearest.item() - want) > 0.2 * want
