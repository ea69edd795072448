"""The fused updates are the published ones, and an element's bits depend on that element (or its block) alone."""

from __future__ import annotations

import math
from itertools import cycle, pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from zeroengine import ops
from zeroengine.ops import MOMENT_BLOCK, RULES, UpdateArrays, update
from zeroengine.optim.lion import Lion

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]
COPIES = [None, BF16, F16]
MOMENTS = [F32, BF16, torch.uint8]
AVERAGES = [None, F32, BF16]
# The dtypes of the parameter and its copy.
PARAMS = [(F32, None), (F32, BF16), (F32, F16), (BF16, None), (F16, None)]
SIZES = [0, 1, 3, 31, 32, 33, 257, 4099]
UPDATES = [rule for rule in RULES if rule != "average_only"]
# The rules, with each dtype of moments that they can have.
STATES = [(rule, moments) for rule in RULES for moments in MOMENTS[: 3 if RULES[rule].signs else 1]]
HYPER: dict[str, Any] = dict(step=7, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, average_weight=0.01)

INDICES = st.integers(0, 2**32) | st.integers(2**24 - 2, 2**24 + 2)

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


class State:
    """The arrays of a rule for n elements, each beginning `skew` elements past an aligned address.

    `index` is that of element 0 among those that share the seed of stochastic rounding.
    """

    def __init__(
        self,
        n: int,
        grad: torch.dtype = F32,
        copy: torch.dtype | None = None,
        moments: torch.dtype = F32,
        skew: int = 0,
        index: int = 0,
        seed: int = 0,
        rule: str = "adamw",
        param: torch.dtype = F32,
        average: torch.dtype | None = None,
    ) -> None:
        self.index, self.rule = index, rule
        generator = torch.Generator().manual_seed(seed)

        def skewed(values: Tensor) -> Tensor:
            return torch.cat([torch.zeros(skew, dtype=values.dtype), values])[skew:]

        def array(dtype: torch.dtype, spread: float = 1.0) -> Tensor:
            values = torch.randn(n, generator=generator) * torch.exp(spread * torch.randn(n, generator=generator))
            return skewed(values.to(dtype))

        self.param = array(param)
        self.moments, self.scales = [], []
        for is_signed in RULES[rule].signs:
            moment = array(F32) if is_signed else array(F32).square_()
            if moments is torch.uint8:
                codes, scales = torch.zeros(n, dtype=torch.uint8), torch.zeros(-(-n // MOMENT_BLOCK))
                ops.encode_moment(moment, codes, scales, is_signed=is_signed)
                moment = codes
                self.scales.append(skewed(scales))
            self.moments.append(skewed(moment.to(moments)))
        self.grad = array(grad, 2.0)
        self.copy = None if copy is None else array(copy)
        self.average = None if average is None else array(average)

    def clone(self, skew: int = 0) -> State:
        """The same values, each array beginning `skew` elements past an aligned address."""

        def copy(x: Tensor) -> Tensor:
            return torch.cat([x.new_zeros(skew), x])[skew:]

        state = State(0, rule=self.rule)
        state.index, state.param, state.grad = self.index, copy(self.param), copy(self.grad)
        state.moments, state.scales = [copy(x) for x in self.moments], [copy(x) for x in self.scales]
        state.copy, state.average = (None if x is None else copy(x) for x in (self.copy, self.average))
        return state

    def arrays(self) -> UpdateArrays:
        arrays = UpdateArrays(self.param, self.grad, tuple(self.moments), tuple(self.scales), self.copy, self.average)
        return arrays.of_rule(self.rule)

    def step(self, begin: int = 0, end: int | None = None, **changes: Any) -> None:
        part = self.arrays().part(begin, self.param.numel() if end is None else end)
        ops.update_step(self.rule, part, offset=self.index + begin, **{**HYPER, **changes})

    def decoded(self) -> list[Tensor]:
        """The moments in float32."""
        if not self.scales:
            return [moment.float() for moment in self.moments]
        codes = zip(self.moments, self.scales, RULES[self.rule].signs, strict=True)
        return [ops.decode_moment(moment, scale, is_signed=is_signed) for moment, scale, is_signed in codes]

    def results(self) -> list[Tensor]:
        return [x for x in (self.param, *self.moments, *self.scales, self.copy, self.average) if x is not None]

    def bits(self) -> list[Tensor]:
        integers = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
        return [x.view(integers[x.element_size()]) for x in self.results()]


def assert_same_bits(a: State, b: State) -> None:
    for x, y in zip(a.bits(), b.bits(), strict=True):
        assert torch.equal(x, y)


def published(rule: str, p: Tensor, g: Tensor, moments: list[Tensor], nesterov: bool = False) -> list[Tensor]:
    """The parameter and the moments after a step of ``HYPER``, as published, for one dtype."""
    lr, beta1, beta2, eps, decay, step = (HYPER[k] for k in ("lr", "beta1", "beta2", "eps", "weight_decay", "step"))
    if rule == "average_only":
        return [p]
    if rule == "lion":
        (m,) = moments
        p = p * (1 - lr * decay) - lr * torch.sign(beta1 * m + (1 - beta1) * g)
        return [p, beta2 * m + (1 - beta2) * g]
    if rule == "adamw":
        p = p * (1 - lr * decay)
    else:
        g = g + decay * p
    if rule == "sgd":
        return [p - lr * g]
    if rule == "momentum_sgd":
        m = beta1 * moments[0] + (1 - beta2) * g
        return [p - lr * (g + beta1 * m if nesterov else m), m]
    if rule == "adagrad":
        total = moments[0] + g * g
        return [p - lr / (1 + (step - 1) * beta1) * g / (total.sqrt() + eps), total]
    m, v = moments
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    return [p - lr / (1 - beta1**step) * m / ((v / (1 - beta2**step)).sqrt() + eps), m, v]


class Exact:
    """A step in float64, and how far float32 may stray from it: as far as steps of inputs that are a little off.

    Values in bfloat16 may go to either neighbour, and codes of 8 bits as well.
    """

    def __init__(self, state: State, grad_scale: float = 1.0, maximize: bool = False, nesterov: bool = False) -> None:
        g = state.grad.double() * (-grad_scale if maximize else grad_scale)
        inputs = [state.param.double(), g, *(x.double() for x in state.decoded())]
        self.average = None if state.average is None else state.average.double()

        def step_of(inputs: list[Tensor]) -> list[Tensor]:
            return published(state.rule, inputs[0], inputs[1], inputs[2:], nesterov)

        self.results = step_of(inputs)
        self.errors = [torch.zeros_like(x) for x in self.results]
        # What comes of terms that cancel is as precise as they are.
        for signs in product((-1, 1), repeat=len(inputs)):
            nearby = step_of([x * (1 + 1e-6 * sign) for x, sign in zip(inputs, signs, strict=True)])
            differences = [(x - y).abs() for x, y in zip(self.results, nearby, strict=True)]
            self.errors = [e.maximum(d) for e, d in zip(self.errors, differences, strict=True)]
        self.errors[0] += 1e-6 * (HYPER["lr"] + inputs[0].abs())

    def check(self, state: State) -> None:
        param = state.param.double()
        self.check_value(state.param, self.results[0], self.errors[0])
        for moment, want, error in zip(state.decoded(), self.results[1:], self.errors[1:], strict=True):
            if not state.scales:
                self.check_value(moment.to(state.moments[0].dtype), want, error)
        for number, (codes, scales) in enumerate(zip(state.moments, state.scales, strict=False)):
            check_codes(codes, scales, self.results[1 + number], RULES[state.rule].signs[number])
        if state.copy is not None:
            assert torch.equal(state.copy, state.param.to(state.copy.dtype))
        if state.average is not None and self.average is not None:
            # The average takes the parameter before it is rounded to 16 bits.
            new, error = (self.results[0], self.errors[0]) if state.param.dtype is not F32 else (param, 0 * param)
            weight = HYPER["average_weight"]
            self.check_value(
                state.average,
                self.average + weight * (new - self.average),
                weight * error + 3e-7 * (self.average.abs() + new.abs()),
            )

    @staticmethod
    def check_value(got: Tensor, want: Tensor, error: Tensor) -> None:
        limits = torch.finfo(got.dtype)
        spacing = 0 if got.dtype is F32 else limits.eps * want.abs() + limits.smallest_normal * limits.eps
        assert ((got.double() - want).abs() <= error + spacing).all()


def check_codes(codes: Tensor, scales: Tensor, values: Tensor, is_signed: bool) -> None:
    """Whether codes are next to where float64 has the values: see "A dynamic code" in csrc/dynamic_code.h."""
    ranges = 7 if is_signed else 8
    for block in range(len(scales)):
        part = slice(block * MOMENT_BLOCK, (block + 1) * MOMENT_BLOCK)
        largest = values[part].abs().max()
        assert abs(scales[block] - largest) <= 1e-5 * largest
        fraction = values[part].abs() / scales[block].double()
        number = fraction * 8.0 ** (ranges - 1)
        for k in range(1, ranges):
            start = 8.0 ** (k - ranges)
            inside = 2**k - 1 + (fraction - start) / (7 * start) * 2**k
            number = torch.where(fraction > start, inside, number)
        signed = codes[part].view(torch.int8) if is_signed else codes[part]
        assert ((signed.double().abs() - number).abs() <= 1.001).all()
        assert not is_signed or ((signed == 0) | (signed.sign() == values[part].sign())).all()
        assert is_signed or ((signed > 0) == (values[part] > 0)).all()


def check_formula(rule: str, moments: torch.dtype) -> None:
    dtypes = cycle(product(DTYPES, PARAMS, AVERAGES))
    flags = cycle([(False, False), (True, False), (False, True)])
    for n in SIZES:
        for skew in (0, 3):
            grad, (param, copy), average = next(dtypes)
            maximize, nesterov = next(flags)
            state = State(n, grad, copy, moments, skew, seed=skew, rule=rule, param=param, average=average)
            exact = Exact(state, 0.37, maximize, nesterov)
            state.step(grad_scale=0.37, maximize=maximize, nesterov=nesterov)
            exact.check(state)


@pytest.mark.parametrize("rule, moments", STATES)
def test_a_step_matches_the_formula_in_float64(isa: str, rule: str, moments: torch.dtype) -> None:
    check_formula(rule, moments)


@pytest.mark.parametrize("rule, moments", STATES)
def test_torch_takes_the_step_where_there_is_no_library(
    monkeypatch: pytest.MonkeyPatch, rule: str, moments: torch.dtype
) -> None:
    monkeypatch.setattr(update, "library", lambda: None)
    check_formula(rule, moments)


# By name: the rule, a torch optimizer, what it takes, and what the kernel takes beside lr, weight_decay and maximize.
PEERS: dict[str, tuple[str, type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "adamw": ("adamw", torch.optim.AdamW, {"betas": (0.9, 0.95)}, {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}),
    "adam": ("adam", torch.optim.Adam, {"betas": (0.9, 0.95)}, {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}),
    "lion": ("lion", Lion, {"betas": (0.9, 0.99)}, {"beta1": 0.9, "beta2": 0.99}),
    "sgd": ("sgd", torch.optim.SGD, {}, {}),
    "momentum": ("momentum_sgd", torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}, {"beta1": 0.9, "beta2": 0.3}),
    "nesterov": (
        "momentum_sgd",
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
        {"beta1": 0.9, "nesterov": True},
    ),
    "adagrad": ("adagrad", torch.optim.Adagrad, {"lr_decay": 0.01}, {"beta1": 0.01, "eps": 1e-10}),
}


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", PEERS)
def test_many_steps_follow_torch(isa: str, name: str, maximize: bool) -> None:
    rule, make, options, factors = PEERS[name]
    torch.manual_seed(1)
    param, moments = torch.randn(1003), tuple(torch.zeros(1003) for _ in RULES[rule].signs)
    mirror = torch.nn.Parameter(param.clone())
    extra = {} if make is Lion else {"maximize": maximize}
    optimizer = make([mirror], lr=1e-2, weight_decay=0.1, **options, **extra)
    for step in range(1, 51):
        grad = torch.randn(1003)
        # Lion has no option to ascend.
        mirror.grad = -grad / 8 if make is Lion and maximize else grad / 8
        optimizer.step()
        shared = dict(lr=1e-2, weight_decay=0.1, grad_scale=1 / 8, maximize=maximize, step=step)
        ops.update_step(rule, UpdateArrays(param, grad, moments), **shared, **factors)
    # The sign of a sum that float32 rounds to zero may differ, and moves an element by 2 lr.
    far = (param - mirror.detach()).abs() > 2e-6 + 1e-5 * mirror.detach().abs()
    assert far.sum() <= (2 if rule == "lion" else 0)


def cuts_of(data: st.DataObject, n: int, moments: torch.dtype) -> list[int]:
    unit = MOMENT_BLOCK if moments is torch.uint8 else 1
    return sorted(unit * cut for cut in data.draw(st.lists(st.integers(0, n // unit), max_size=5)))


@per_isa
@given(data=st.data(), n=st.integers(0, 1000), state=st.sampled_from(STATES), params=st.sampled_from(PARAMS))
def test_pieces_get_the_bits_of_the_whole_buffer(
    isa: str, data: st.DataObject, n: int, state: tuple[str, torch.dtype], params: tuple[torch.dtype, Any]
) -> None:
    (rule, moments), (param, copy) = state, params
    grad, average, index = (data.draw(x) for x in (st.sampled_from(DTYPES), st.sampled_from(AVERAGES), INDICES))
    options = dict(grad_scale=0.3, seed=data.draw(st.integers(0, 2**63 - 1)))
    cuts = cuts_of(data, n, moments)
    whole, pieces = (
        State(n, grad, copy, moments, skew, MOMENT_BLOCK * index, rule=rule, param=param, average=average)
        for skew in (0, data.draw(st.integers(0, 40)))
    )
    whole.step(**options)
    for begin, end in pairwise([0, *cuts, n]):
        pieces.step(begin, end, **options)
    assert_same_bits(whole, pieces)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(0, 1000), state=st.sampled_from(STATES), index=INDICES)
def test_torch_gives_pieces_the_bits_of_the_whole_buffer(
    data: st.DataObject, n: int, state: tuple[str, torch.dtype], index: int
) -> None:
    rule, moments = state
    cuts = cuts_of(data, n, moments)
    whole, pieces = (State(n, BF16, None, moments, skew, MOMENT_BLOCK * index, rule=rule) for skew in (0, 3))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(update, "library", lambda: None)
        whole.step()
        for begin, end in pairwise([0, *cuts, n]):
            pieces.step(begin, end)
    assert_same_bits(whole, pieces)


@pytest.mark.parametrize(
    "rule, moments, copy, average",
    [("adamw", F32, BF16, None), ("adamw", torch.uint8, F16, F32), ("lion", BF16, None, BF16), ("sgd", F32, BF16, F32)],
)
def test_large_buffers_get_the_same_bits_in_pieces_and_on_any_number_of_threads(
    isa: str, rule: str, moments: torch.dtype, copy: torch.dtype | None, average: torch.dtype | None
) -> None:
    n = (1 << 21) + 1037  # past the size from which the copy is streamed
    # Where the upper half of the index changes, an update begins anew, in the midst of a cache line.
    index = 2**32 - (MOMENT_BLOCK << 12) - (0 if moments is torch.uint8 else 3)
    whole = State(n, BF16, copy, moments, index=index, rule=rule, average=average)
    states = [(1, whole.clone(1)), (5, whole.clone(16)), (2, whole.clone())]
    whole.step()
    threads = torch.get_num_threads()
    for num_threads, state in states:
        try:
            torch.set_num_threads(num_threads)
            size = 99840 if num_threads == 2 else n
            for begin in range(0, n, size):
                state.step(begin, min(begin + size, n))
        finally:
            torch.set_num_threads(threads)
        assert_same_bits(whole, state)


@pytest.mark.parametrize("rule, moments", STATES)
def test_every_instruction_set_gives_the_same_bits(isa: str, rule: str, moments: torch.dtype) -> None:
    for i, (grad, (param, copy)) in enumerate(product(DTYPES, PARAMS)):
        average = AVERAGES[i % 3]
        state, portable = (
            State(2099, grad, copy, moments, index=MOMENT_BLOCK << 24, rule=rule, param=param, average=average)
            for _ in range(2)
        )
        for step in (1, 2):
            state.step(step=step, reload_written=True, nesterov=True)
        before = ops.cpu_isa()
        ops.set_cpu_isa("portable")
        for step in (1, 2):
            portable.step(step=step, reload_written=True, nesterov=True)
        ops.set_cpu_isa(before)
        assert_same_bits(state, portable)


@pytest.mark.parametrize("rule, moments", [x for x in STATES if x[0] not in ("adam", "adamw")])
def test_torch_gives_nearly_the_bits_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, rule: str, moments: torch.dtype
) -> None:
    """A root or a division of torch's may round its last bit differently, on some processors more often."""
    for param, copy in PARAMS:
        kernel, torchs = (
            State(70_001, BF16, copy, moments, index=2**32 - 512, rule=rule, param=param, average=BF16)
            for _ in range(2)
        )
        kernel.step(step=1)
        with monkeypatch.context() as patch:
            patch.setattr(update, "library", lambda: None)
            torchs.step(step=1)
        for ours, theirs in zip(kernel.bits(), torchs.bits(), strict=True):
            assert (ours != theirs).double().mean() < 1e-2


@pytest.mark.parametrize("rule", UPDATES)
def test_nan_and_infinity_stay_where_they_are(isa: str, rule: str) -> None:
    state, clean = (State(100, copy=BF16, rule=rule) for _ in range(2))
    bad = {5: math.nan, 40: math.inf, 99: -math.inf}
    for i, value in bad.items():
        state.grad[i] = value
    state.step()
    clean.step()
    for got, want in zip(state.results(), clean.results(), strict=True):
        rest = [i for i in range(100) if i not in bad]
        assert torch.equal(got[rest], want[rest])
    # Lion moves by the sign of infinity.
    lost = [5] if rule == "lion" else list(bad)
    assert rule == "lion" or not state.param[lost].isfinite().any()
    assert all(not moment[list(bad)].isfinite().any() for moment in state.moments)


def test_wrong_arguments_are_refused() -> None:
    x = torch.zeros(4)
    correct = UpdateArrays(x, x, (x, x))
    codes = torch.zeros(4, dtype=torch.uint8)
    ops.update_step("adamw", correct, **HYPER)
    for changes in (
        dict(grad=x.double()),
        dict(param=x.double()),
        dict(low_precision_param=x),
        dict(param=x.bfloat16(), low_precision_param=x.bfloat16()),
        dict(moments=(torch.zeros(5), x)),
        dict(moments=(x, torch.zeros(8)[::2])),
        dict(grad=torch.zeros(2, 2)),
        dict(moments=(x.half(), x.half())),
        dict(moments=(x.bfloat16(), x)),
        dict(moments=(x,)),
        dict(moments=(codes, codes)),
        dict(moments=(codes, codes), scales=(torch.zeros(1), torch.zeros(2))),
        dict(average=x.half()),
    ):
        with pytest.raises(AssertionError):
            ops.update_step("adamw", correct._replace(**changes), **HYPER)  # type: ignore[arg-type]
    for rule, arrays in (("lion", correct), ("adamw", correct._replace(grad=None))):
        with pytest.raises(AssertionError):
            ops.update_step(rule, arrays, **HYPER)
    for numbers in (dict(step=0), dict(seed=-1), dict(offset=2**63)):
        with pytest.raises(AssertionError):
            ops.update_step("adamw", correct, **{**HYPER, **numbers})
    scales = (torch.zeros(1), torch.zeros(1))
    with pytest.raises(AssertionError):
        ops.update_step("adamw", correct._replace(moments=(codes, codes), scales=scales), **HYPER, offset=8)
