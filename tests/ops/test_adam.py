"""The fused Adam is Adam, and an element's bits depend on that element alone."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.parametrization import in_turn
from zeroengine import ops
from zeroengine.ops import adam

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COPIES = [None, torch.bfloat16, torch.float16]
MOMENTS = [torch.float32, torch.bfloat16]
SIZES = [0, 1, 3, 15, 31, 32, 33, 257, 4099, 70001]
HYPER: dict[str, Any] = dict(step=7, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)

INDICES = st.integers(0, 2**40) | st.integers(2**32 - 400, 2**32)

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


class State:
    """Adam's arrays for n elements, each beginning `skew` elements past an aligned address.

    `index` is that of element 0 among those that share the seed of stochastic rounding.
    """

    def __init__(
        self,
        n: int,
        grad: torch.dtype = torch.float32,
        copy: torch.dtype | None = None,
        moments: torch.dtype = torch.float32,
        skew: int = 0,
        index: int = 0,
        seed: int = 0,
    ) -> None:
        self.index = index
        generator = torch.Generator().manual_seed(seed)

        def array(dtype: torch.dtype, spread: float = 1.0) -> Tensor:
            values = torch.randn(n, generator=generator) * torch.exp(spread * torch.randn(n, generator=generator))
            return torch.cat([torch.zeros(skew), values]).to(dtype)[skew:]

        self.param, self.exp_avg, self.exp_avg_sq = (array(dtype) for dtype in (torch.float32, moments, moments))
        self.exp_avg_sq.square_()
        self.grad = array(grad, 2.0)
        self.copy = None if copy is None else array(copy)

    def step(self, begin: int = 0, end: int | None = None, **changes: Any) -> None:
        chunk = slice(begin, end)
        arrays = (x[chunk] for x in (self.param, self.grad, self.exp_avg, self.exp_avg_sq))
        copy = None if self.copy is None else self.copy[chunk]
        ops.adam_step(*arrays, low_precision_param=copy, offset=self.index + begin, **{**HYPER, **changes})

    def results(self) -> list[Tensor]:
        copy = [] if self.copy is None else [self.copy]
        return [self.param, self.exp_avg, self.exp_avg_sq, *copy]

    def bits(self) -> list[Tensor]:
        return [x.view(torch.int32 if x.dtype == torch.float32 else torch.int16) for x in self.results()]


def assert_same_bits(a: State, b: State) -> None:
    for x, y in zip(a.bits(), b.bits(), strict=True):
        assert torch.equal(x, y)


class Exact:
    """A step of the published algorithm in float64, and how far float32's rounding may stray from it.

    Moments in bfloat16 may go to either neighbour.
    """

    def __init__(self, state: State, grad_scale: float = 1.0, decoupled: bool = True, maximize: bool = False) -> None:
        p, g, m, v = (x.double() for x in (state.param, state.grad, state.exp_avg, state.exp_avg_sq))
        lr, beta1, beta2, decay, step = (HYPER[k] for k in ("lr", "beta1", "beta2", "weight_decay", "step"))
        g = g * (-grad_scale if maximize else grad_scale)
        largest_g = g.abs() if decoupled else g.abs() + decay * p.abs()
        p, g = (p * (1 - lr * decay), g) if decoupled else (p, g + decay * p)
        largest_m = m.abs() + largest_g
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        rate = lr / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + HYPER["eps"])
        self.results = [p - rate * m, m, v]
        largest_v = v + (1 - beta2) * largest_g**2
        self.scales = [p.abs() + rate * largest_m * largest_v / v, largest_m, largest_v]

    def check(self, state: State, ulps: float = 4) -> None:
        eps = torch.finfo(torch.float32).eps
        for got, want, scale in zip(state.results()[:3], self.results, self.scales, strict=True):
            spacing = 0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps * want.abs()
            assert ((got - want).abs() <= ulps * eps * scale + spacing).all()
        if state.copy is not None:
            assert torch.equal(state.copy, state.param.to(state.copy.dtype))


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_a_step_matches_the_algorithm_in_float64(
    isa: str, n: int, grad: torch.dtype, copy: torch.dtype | None, moments: torch.dtype
) -> None:
    for seed, (decoupled, maximize) in enumerate([(True, False), (True, True), (False, False), (False, True)]):
        state = State(n, grad, copy, moments, skew=seed, seed=seed)
        exact = Exact(state, 0.37, decoupled, maximize)
        state.step(grad_scale=0.37, decoupled=decoupled, maximize=maximize)
        exact.check(state)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decoupled", [True, False])
def test_many_steps_follow_torch(isa: str, decoupled: bool, maximize: bool) -> None:
    torch.manual_seed(1)
    n, hyper = 1003, {k: v for k, v in HYPER.items() if k != "step"}
    param, exp_avg, exp_avg_sq = torch.randn(n), torch.zeros(n), torch.zeros(n)
    mirror = torch.nn.Parameter(param.clone())
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = make([mirror], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, maximize=maximize)
    for step in range(1, 101):
        grad = torch.randn(n)
        mirror.grad = grad / 8
        optimizer.step()
        extra = dict(decoupled=decoupled, maximize=maximize, grad_scale=1 / 8)
        ops.adam_step(param, grad, exp_avg, exp_avg_sq, **hyper, **extra, step=step)
    torch.testing.assert_close(param, mirror.detach(), rtol=1e-5, atol=2e-6)


@per_isa
@given(data=st.data(), n=st.integers(0, 400), grad=st.sampled_from(DTYPES), copy=st.sampled_from(COPIES))
def test_pieces_get_the_bits_of_the_whole_buffer(
    isa: str, data: st.DataObject, n: int, grad: torch.dtype, copy: torch.dtype | None
) -> None:
    moments, index, seed = (data.draw(x) for x in (st.sampled_from(MOMENTS), INDICES, st.integers(0, 2**63 - 1)))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
    whole, pieces = (State(n, grad, copy, moments, skew, index) for skew in (0, data.draw(st.integers(0, 40))))
    whole.step(grad_scale=0.3, seed=seed)
    for begin, end in pairwise([0, *cuts, n]):
        pieces.step(begin, end, grad_scale=0.3, seed=seed)
    assert_same_bits(whole, pieces)


@in_turn(("copy", "moments"), COPIES, MOMENTS)
def test_large_buffers_get_the_same_bits_in_pieces_and_on_any_number_of_threads(
    isa: str, copy: torch.dtype | None, moments: torch.dtype
) -> None:
    n = (1 << 21) + 1037  # past the size from which the copy is streamed
    index = 2**32 - 10**6
    threads = torch.get_num_threads()
    states = []
    try:
        for num_threads, skew in [(1, 0), (2, 1), (3, 7), (5, 16)]:
            torch.set_num_threads(num_threads)
            states.append(State(n, torch.bfloat16, copy, moments, skew, index))
            states[-1].step()
    finally:
        torch.set_num_threads(threads)
    states.append(State(n, torch.bfloat16, copy, moments, index=index))
    for begin in range(0, n, 99991):
        states[-1].step(begin, begin + 99991)
    for state in states[1:]:
        assert_same_bits(states[0], state)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("grad", DTYPES)
def test_every_instruction_set_gives_the_same_bits(
    isa: str, grad: torch.dtype, copy: torch.dtype | None, moments: torch.dtype
) -> None:
    state, portable = (State(4099, grad, copy, moments, index=10**10) for _ in range(2))
    state.step()
    ops.set_cpu_isa("portable")
    portable.step()
    assert_same_bits(state, portable)


def test_nan_and_infinity_stay_where_they_are(isa: str) -> None:
    state, clean = State(100, copy=torch.bfloat16), State(100, copy=torch.bfloat16)
    bad = {5: math.nan, 40: math.inf, 99: -math.inf}
    for i, value in bad.items():
        state.grad[i] = value
    state.step()
    clean.step()
    for got, want in zip(state.results(), clean.results(), strict=True):
        rest = [i for i in range(100) if i not in bad]
        assert torch.equal(got[rest], want[rest])
    assert not state.param[list(bad)].isfinite().any()
    assert state.copy is not None and not state.copy[list(bad)].isfinite().any()


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("grad", DTYPES)
def test_torch_takes_the_step_where_there_is_no_library(
    monkeypatch: pytest.MonkeyPatch,
    grad: torch.dtype,
    copy: torch.dtype | None,
    decoupled: bool,
    moments: torch.dtype,
) -> None:
    monkeypatch.setattr(adam, "library", lambda: None)
    for n in SIZES:
        state = State(n, grad, copy, moments)
        exact = Exact(state, 0.37, decoupled)
        state.step(grad_scale=0.37, decoupled=decoupled)
        exact.check(state)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    n=st.integers(0, 400),
    grad=st.sampled_from(DTYPES),
    moments=st.sampled_from(MOMENTS),
    index=INDICES,
)
def test_torch_gives_pieces_the_bits_of_the_whole_buffer(
    data: st.DataObject, n: int, grad: torch.dtype, moments: torch.dtype, index: int
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    whole, pieces = (State(n, grad, None, moments, skew, index) for skew in (0, 3))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(adam, "library", lambda: None)
        whole.step(decoupled=False)
        for begin, end in pairwise([0, *cuts, n]):
            pieces.step(begin, end, decoupled=False)
    assert_same_bits(whole, pieces)


def test_wrong_arguments_are_refused() -> None:
    correct = dict.fromkeys(("param", "grad", "exp_avg", "exp_avg_sq"), torch.zeros(4)) | HYPER
    ops.adam_step(**correct)
    for changes in (
        dict(grad=torch.zeros(4, dtype=torch.float64)),
        dict(param=torch.zeros(4, dtype=torch.bfloat16)),
        dict(low_precision_param=torch.zeros(4)),
        dict(exp_avg=torch.zeros(5)),
        dict(exp_avg_sq=torch.zeros(8)[::2]),
        dict(grad=torch.zeros(2, 2)),
        dict(exp_avg=torch.zeros(4, dtype=torch.float16)),
        dict(exp_avg=torch.zeros(4, dtype=torch.bfloat16)),
        dict(step=0),
        dict(seed=-1),
        dict(offset=2**63),
    ):
        with pytest.raises(AssertionError):
            ops.adam_step(**correct | changes)
