"""The CUDA kernels give the CPU kernels' bits: run on a CPU, thread for thread, and on a GPU where there is one."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.emulated import build_kernels
from tests.ops import cuda
from tests.ops.test_update import AVERAGES, DTYPES, MOMENTS, PARAMS, STATES, State
from zeroengine import ops
from zeroengine.ops import MOMENT_BLOCK, RULES, SegmentList, UpdateSegment, UpdateTable, _cuda_library

pytestmark = pytest.mark.gpu

TILE = 2048  # elements of an update's tiles: sizes around it have whole tiles, heads and tails
SLAB = 1024  # elements that a block of threads updates at one time
NORM_TILE = 1 << 14

on_gpu = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)


@dataclass(frozen=True)
class Gpu:
    """Where the kernels run. Inside ``serving()`` tensors on ``device`` go to the CUDA library."""

    device: torch.device
    serving: Callable[[], AbstractContextManager[Any]]

    def put(self, x: Tensor, skew: int = 0) -> Tensor:
        """A copy, `skew` elements past an aligned address, with something around it that is to stay."""
        room = torch.full((x.numel() + skew + 64,), 77, dtype=x.dtype, device=self.device)
        assert room.data_ptr() % 16 == 0
        room[skew : skew + x.numel()] = x.flatten()
        return room[skew : skew + x.numel()].view(x.shape)

    def state(self, cpu: State, skews: Sequence[int] = (0, 0, 0, 0, 0, 0)) -> State:
        """The same values, where the kernels run."""
        state = State(0, rule=cpu.rule)
        state.index = cpu.index
        param, grad, low, average, *moments = skews
        state.param, state.grad = self.put(cpu.param, param), self.put(cpu.grad, grad)
        state.moments = [self.put(x, skew) for x, skew in zip(cpu.moments, moments, strict=False)]
        state.scales = [self.put(x) for x in cpu.scales]
        state.copy = None if cpu.copy is None else self.put(cpu.copy, low)
        state.average = None if cpu.average is None else self.put(cpu.average, average)
        return state


def intact(x: Tensor) -> bool:
    """Whether what lies around a tensor of ``Gpu.put`` stayed."""
    begin = x.storage_offset()
    room = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return bool((room[:begin] == 77).all() and (room[begin + x.numel() :] == 77).all())


@pytest.fixture(scope="session")
def emulated() -> Path:
    return build_kernels()


def emulating(path: Path) -> Gpu:
    @contextmanager
    def serving() -> Iterator[ctypes.CDLL]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            yield cuda.emulate(monkeypatch, path)

    return Gpu(torch.device("cpu"), serving)


@pytest.fixture(params=["emulated", "cuda"])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    if ops.library() is None:
        pytest.skip("zeroengine's CPU library was not built: there is nothing to compare with")
    if request.param == "emulated":
        return emulating(request.getfixturevalue("emulated"))
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    cuda.need_library()
    return Gpu(torch.device("cuda", 0), nullcontext)


def same(got: Tensor, want: Tensor) -> bool:
    """Bit for bit, save that any NaN is as good as another."""
    got, want = got.cpu(), want.cpu()
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[got.element_size()]
    number = ~want.isnan()
    bits = torch.equal(got[number].view(integer), want[number].view(integer))
    return got.dtype == want.dtype and bits and bool(got[~number].isnan().all())


def check_same(got: State, want: State) -> None:
    for x, y in zip(got.results(), want.results(), strict=True):
        assert same(x, y)
        assert intact(x)
    assert intact(got.grad)


# -- updates --------------------------------------------------------------------------------------------------

SIZES = [0, 5, MOMENT_BLOCK + 1, SLAB, TILE + 3, 2 * TILE + 1]


def check_update(gpu: Gpu, rule: str, moments: torch.dtype, sizes: Sequence[int] = SIZES) -> None:
    """Each size with other dtypes, alignments and flags."""
    # Each rule begins elsewhere, so that all dtypes have their turn at all sizes.
    turn = STATES.index((rule, moments))
    for place, n in enumerate(sizes, turn):
        (param, low), grad, average = PARAMS[place % 5], DTYPES[place % 3], AVERAGES[(place + turn) % 3]
        for case, skews in enumerate(([0] * 6, [n % 4] * 6, [0, 1, 2, 3, 1, 2])):
            index = 2**32 - 2 * MOMENT_BLOCK
            want = State(n, grad, low, moments, 0, index, n + case, rule=rule, param=param, average=average)
            if want.copy is not None:
                want.copy[::2] = want.param[::2]  # every other value was written
            got = gpu.state(want, skews)
            options: dict[str, Any] = dict(grad_scale=0.37, maximize=case == 1, seed=5, step=1 + case)
            options |= dict(reload_written=case < 2, nesterov=case == 2)
            want.step(**options)
            with gpu.serving():
                got.step(**options)
            check_same(got, want)


@pytest.mark.parametrize("rule, moments", STATES)
def test_an_update_gives_the_bits_of_the_cpu(gpu: Gpu, rule: str, moments: torch.dtype) -> None:
    check_update(gpu, rule, moments)


@pytest.mark.parametrize("moments", MOMENTS)
def test_adamw_gives_the_bits_of_the_cpu_over_many_tiles(gpu: Gpu, moments: torch.dtype) -> None:
    check_update(gpu, "adamw", moments, [0, 20_001])


@pytest.mark.parametrize("rule, moments", STATES)
def test_values_at_the_edges_get_the_bits_of_the_cpu(gpu: Gpu, rule: str, moments: torch.dtype) -> None:
    check_edges(gpu, rule, moments)


def check_edges(gpu: Gpu, rule: str, moments: torch.dtype) -> None:
    """Zeros, subnormals, the largest, infinities and NaN, in every combination."""
    edges = [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 1e-20, 1.0, -3.0, 1e19, 3.39e38, 3.4e38, math.inf, -math.inf, math.nan]
    grid = torch.cartesian_prod(*[torch.tensor(edges, dtype=torch.float32)] * (2 + len(RULES[rule].signs)))
    want = State(len(grid), torch.float32, torch.bfloat16, moments, rule=rule, average=torch.bfloat16)
    for x, values in zip((want.param, want.grad, *want.moments), grid.T, strict=True):
        if x.dtype is not torch.uint8:
            x.copy_(values)
    for x, values in zip(want.scales, grid.T[2:], strict=False):
        x.copy_(values[:: -(-len(values) // len(x))].abs().nan_to_num())
    got = gpu.state(want)
    want.step(step=3)
    with gpu.serving():
        got.step(step=3)
    check_same(got, want)


@pytest.mark.parametrize("step", [1, 2, 999, 10**6, 2**40])
@pytest.mark.parametrize("rule", ["adamw", "momentum_sgd", "adagrad"])
def test_an_update_gives_the_bits_of_the_cpu_at_every_step_count(gpu: Gpu, rule: str, step: int) -> None:
    want = State(100, rule=rule)
    got = gpu.state(want)
    want.step(step=step)
    with gpu.serving():
        got.step(step=step)
    check_same(got, want)


# -- many segments --------------------------------------------------------------------------------------------

GROUPS: list[dict[str, Any]] = [
    dict(rule="adamw", lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, average_weight=0.1),
    dict(rule="adamw", lr=3e-3, beta1=0.8, beta2=0.999, eps=1e-6, weight_decay=0.0, maximize=True),
    dict(rule="adam", lr=1e-1, beta1=0.5, beta2=0.9, eps=1e-3, weight_decay=0.3, average_weight=0.2),
]
# Rules that segments of one buffer may have.
MIXTURES: dict[str, list[dict[str, Any]]] = {
    "adamw": GROUPS,
    "momentum_sgd": [
        dict(rule="momentum_sgd", lr=1e-2, beta1=0.9, beta2=0.1, nesterov=True, average_weight=0.1),
        dict(rule="sgd", lr=3e-3, weight_decay=0.1, maximize=True),
        dict(rule="momentum_sgd", lr=1e-1, beta1=0.5),
    ],
    "lion": [dict(rule="lion", lr=1e-3 * (i + 1), beta1=0.9, beta2=0.99, weight_decay=0.1 * i) for i in range(3)],
    "adagrad": [dict(rule="adagrad", lr=1e-2 * (i + 1), beta1=0.1 * i, eps=1e-10) for i in range(3)],
    "sgd": [dict(rule="sgd", lr=1e-2 * (i + 1), average_weight=0.1) for i in range(3)],
}


def check_table(
    gpu: Gpu,
    cuts: Sequence[Sequence[int]],
    flags: Sequence[Sequence[float]],
    overflows: Sequence[bool],
    rule: str = "adamw",
    skew: int = 0,
    **dtypes: Any,
) -> None:
    """Steps of buffers that are cut into segments, with gaps; the same by `update_step`, segment by segment."""
    unit = MOMENT_BLOCK if dtypes.get("moments") is torch.uint8 else 1
    buffers, slots = [], 0
    for number, places in enumerate(cuts):
        segments = []
        for i, (start, stop) in enumerate(pairwise(places)):
            start = min(-(-start // unit) * unit, stop // unit * unit)
            if i % 4 != 2:  # the others are gaps
                segments.append(UpdateSegment(start, max(start, stop - stop % unit), i % len(GROUPS), slots + i % 2))
        slots += 2
        buffers.append(SegmentList(segments, seed=number << 32, offset=2**32 - (4 + number) * MOMENT_BLOCK))
    want = [State(max(places, default=0) + 7, seed=i, rule=rule, **dtypes) for i, places in enumerate(cuts)]
    got = [gpu.state(state, [skew] * 6) for state in want]
    tables = []
    for states, device, context in ((want, torch.device("cpu"), nullcontext), (got, gpu.device, gpu.serving)):
        with context():
            table = UpdateTable(buffers, len(GROUPS), slots, device)
            table.set_groups(MIXTURES[rule])
            for used, overflow in zip(flags, overflows, strict=True):
                factor = torch.tensor([0.37, 1.0, float(overflow)], dtype=torch.float64, device=device)
                table.prepare(factor, torch.tensor(used[:slots], dtype=torch.float64, device=device))
                for i, s in enumerate(states):
                    table.set_arrays(i, s.arrays(), reload_written=i % 2 == 0)
                table.update(0, len(states))
            tables.append(table)
    assert torch.equal(tables[0].steps, tables[1].steps.cpu())
    for x, y in zip(got, want, strict=True):
        check_same(x, y)


@on_gpu
@given(
    data=st.data(),
    grad=st.sampled_from(DTYPES),
    params=st.sampled_from(PARAMS),
    moments=st.sampled_from(MOMENTS),
    average=st.sampled_from(AVERAGES),
    rule=st.sampled_from(sorted(MIXTURES)),
)
def test_many_segments_are_updated_in_one_launch(
    gpu: Gpu,
    data: st.DataObject,
    grad: torch.dtype,
    params: tuple[torch.dtype, Any],
    moments: torch.dtype,
    average: torch.dtype | None,
    rule: str,
) -> None:
    places = st.lists(st.integers(0, 2 * TILE + 50) | st.integers(0, 40), max_size=12).map(sorted)
    cuts = data.draw(st.lists(places, min_size=1, max_size=3))
    flags = data.draw(st.lists(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=6, max_size=6), max_size=3))
    overflows = [data.draw(st.booleans()) for _ in flags]
    dtypes = dict(grad=grad, param=params[0], copy=params[1], moments=moments, average=average)
    check_table(gpu, cuts, flags, overflows, rule, data.draw(st.integers(0, 3)), **dtypes)


def test_more_segments_than_threads_are_updated(gpu: Gpu) -> None:
    dtypes = dict(grad=torch.bfloat16, copy=torch.bfloat16, moments=torch.bfloat16)
    check_table(gpu, [range(0, 5 * 400, 5)], [[1.0, 1.0], [0.0, 1.0]], [False, False], **dtypes)


def test_an_average_goes_on_without_a_gradient_and_without_counting_a_step(gpu: Gpu) -> None:
    """Averages in bf16 as well: their rounding takes new bits at each step that anything is counted."""
    state = gpu.state(State(2 * TILE, rule="sgd", average=torch.bfloat16))
    state.param.fill_(1.0)
    assert state.average is not None
    state.average.fill_(0.0)
    kept = state.grad.clone()
    with gpu.serving():
        table = UpdateTable([SegmentList([UpdateSegment(0, 2 * TILE, 0, 0)])], 1, 2, gpu.device)
        table.set_groups([dict(rule="sgd", lr=0.1, average_weight=0.001)])
        for _ in range(300):
            used = torch.tensor([0.0, 1.0], dtype=torch.float64, device=gpu.device)
            table.prepare(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64, device=gpu.device), used)
            table.set_arrays(0, state.arrays())
            table.update(0, 1)
    assert table.steps.tolist() == [0, 300]
    assert (state.param == 1.0).all() and torch.equal(state.grad, kept)
    assert state.average.double().mean().item() == pytest.approx(1 - 0.999**300, abs=0.005)


@pytest.mark.parametrize("moments", MOMENTS)
def test_an_overflow_changes_nothing(gpu: Gpu, moments: torch.dtype) -> None:
    before = State(3 * TILE, torch.float32, torch.bfloat16, moments, average=torch.float32)
    state = gpu.state(before)
    with gpu.serving():
        table = UpdateTable([SegmentList([UpdateSegment(0, 3 * TILE, 0, 0)])], 1, 1, gpu.device)
        table.set_groups(GROUPS[:1])
        table.prepare(ops.gradient_factor(torch.tensor(math.nan, dtype=torch.float64, device=gpu.device)))
        table.set_arrays(0, state.arrays())
        table.update(0, 1)
    assert table.steps.tolist() == [0]
    check_same(state, before)


def test_groups_follow_the_schedule(gpu: Gpu) -> None:
    """More of them than travel in one piece; and a learning rate that is already on the device."""
    with gpu.serving():
        table = UpdateTable([], 100, 1, gpu.device)
        for lr in (0.1, 0.2, 0.2):
            groups = [{**GROUPS[2], "lr": lr + i} for i in range(100)]
            table.set_groups(groups)
            assert table.groups[:, 0].tolist() == [lr + i for i in range(100)]
            assert table.groups[99].tolist() == [lr + 99, 0.5, 0.9, 1e-3, 0.3, 0.2, RULES["adam"].code, 0.0, 0.0]


def test_wrong_tables_are_refused() -> None:
    cpu = torch.device("cpu")
    for segments in (
        [UpdateSegment(0, 5, 0, 0), UpdateSegment(4, 9, 0, 0)],
        [UpdateSegment(5, 4, 0, 0)],
        [UpdateSegment(0, 5, 1, 0)],
        [UpdateSegment(0, 5, 0, 1)],
    ):
        with pytest.raises(AssertionError):
            UpdateTable([SegmentList(segments)], 1, 1, cpu)
    table = UpdateTable([SegmentList([UpdateSegment(0, 5, 0, 0)])], 1, 1, cpu)
    with pytest.raises(AssertionError):
        table.prepare(torch.ones(3))
    with pytest.raises(AssertionError):
        table.set_groups(GROUPS[:2])
    with pytest.raises(AssertionError):
        table.set_groups([{**GROUPS[0], "betas": (0.9, 0.95)}])
    for numel in (4, 5):
        with pytest.raises(AssertionError):
            x = torch.zeros(4)
            table.set_arrays(0, ops.UpdateArrays(torch.zeros(numel), torch.zeros(numel), (x, x)))
    with pytest.raises(AssertionError, match="set_arrays comes before"):
        table.update(0, 1)
    # Blocks of moments in 8 bits begin with segments.
    state = State(1000, moments=torch.uint8)
    for segment, offset in ((UpdateSegment(8, 1000, 0, 0), 0), (UpdateSegment(0, 1000, 0, 0), 8)):
        with pytest.raises(AssertionError):
            UpdateTable([SegmentList([segment], offset=offset)], 1, 1, cpu).set_arrays(0, state.arrays())


# -- norm and factor ------------------------------------------------------------------------------------------


def random(n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator) * torch.exp(3 * torch.randn(n, generator=generator))
    return values.clamp(-6e4, 6e4).to(dtype)


def check_norm(gpu: Gpu, tensors: Sequence[Tensor], skew: int = 0) -> float:
    exact = math.fsum(x.double().square().sum().item() for x in tensors)
    with gpu.serving():
        got = ops.squared_norms([gpu.put(x, skew) for x in tensors])
    assert got.dtype is torch.float64 and got.dim() == 0
    assert abs(got.item() - exact) <= 1e-13 * exact
    return float(got.item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 3, 8, 9, 2047, NORM_TILE - 1, NORM_TILE, NORM_TILE + 1, 5 * NORM_TILE + 77])
def test_the_norm_matches_float64_and_does_not_depend_on_alignment(gpu: Gpu, dtype: torch.dtype, n: int) -> None:
    x = random(n, dtype)
    assert len({check_norm(gpu, [x], skew) for skew in (0, 1, 3, 8)}) == 1


def test_the_norm_of_many_tensors_matches_float64(gpu: Gpu) -> None:
    tensors = [random(n * 97 % 5000 * (n % 3 > 0), DTYPES[n % 3], n) for n in range(200)]
    check_norm(gpu, tensors)
    check_norm(gpu, [torch.empty(0)] * 3)


def test_the_norm_of_several_tensors_is_the_sum_of_their_own_to_the_last_bit(gpu: Gpu) -> None:
    """So states that are away, whose norms are taken one by one, clip gradients to the bits of states that are here."""
    tensors = [random(n * 977 % 50_000 + (n == 3) * NORM_TILE * 9, DTYPES[n % 3], n) for n in range(70)]
    alone = 0.0
    for x in tensors:
        alone += check_norm(gpu, [x])
    assert check_norm(gpu, tensors) == alone


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_not_finite_exactly_if_an_element_is_not(gpu: Gpu, dtype: torch.dtype, bad: float) -> None:
    n = NORM_TILE + 35
    largest = torch.full((n,), torch.finfo(dtype).max, dtype=dtype)
    with gpu.serving():
        assert ops.squared_norm(gpu.put(largest)).isfinite()
        for place in (0, 1, 255, 4097, NORM_TILE - 1, NORM_TILE, n - 1):
            x = gpu.put(random(n, dtype))
            x[place] = bad
            assert not ops.squared_norm(x).isfinite()


def test_the_grid_does_not_change_a_result(emulated: Path) -> None:
    """One block that takes all tiles in turn, or one for each."""
    x, want = random(70 * NORM_TILE, torch.bfloat16), State(70 * TILE, copy=torch.float16, moments=torch.uint8)
    norms = []
    for count in (1, 100):
        gpu = emulating(emulated)
        state = gpu.state(want)
        with gpu.serving() as handle:
            cuda.set_multiprocessors(handle, count)
            norms.append((ops.squared_norm(x).item(), ops.digest(x).item()))
            state.step()
            cuda.set_multiprocessors(handle, 2)
        if count == 1:
            first = state
    assert norms[0] == norms[1]
    check_same(state, first)


def engines_factor(total: float, divisor: float, limit: float) -> float:
    """As Engine.step computes it on the host."""
    grad_norm = (math.sqrt(total) if total >= 0 else math.nan) / divisor
    factor = limit / (grad_norm + 1e-6) if limit > 0 else 1.0
    return (1.0 if factor > 1 else factor) / divisor


@pytest.mark.parametrize("where", ["here", "gpu"])
def test_the_factor_unscales_clips_and_reports_overflow(gpu: Gpu, where: str) -> None:
    with gpu.serving() if where == "gpu" else nullcontext():
        device = gpu.device if where == "gpu" else torch.device("cpu")

        def tensor(x: float) -> Tensor:
            return torch.tensor(x, dtype=torch.float64, device=device)

        for total in (0.0, 1e-300, 0.3, 7.0, 1e40, math.inf, math.nan):
            for limit in (0.0, 1e-9, 0.5, 1e9):
                for divisor in (6.0, 18.0, 6.0 * 65536.0):
                    got = ops.gradient_factor(tensor(total), divisor=divisor, limit=limit).tolist()
                    want = [engines_factor(total, divisor, limit), math.sqrt(total) / divisor]
                    assert got[:2] == pytest.approx(want, rel=0, abs=0, nan_ok=True)
                    assert got[2] == (not math.isfinite(total))
        assert ops.gradient_factor(tensor(math.inf), limit=1.0, skip=False).tolist() == [0.0, math.inf, 0.0]


def test_a_wrong_norm_is_refused() -> None:
    for norm in (torch.ones(()), torch.ones(1, dtype=torch.float64)):
        with pytest.raises(AssertionError):
            ops.gradient_factor(norm)


# -- casts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tensors_are_cast_in_one_launch(gpu: Gpu, dtype: torch.dtype, accumulate: bool) -> None:
    numels = [0, 1, 3, 4095, 4096, 4097, 9001, *(i * 37 % 600 for i in range(150))]
    sources = [random(n, DTYPES[i % 3], i) for i, n in enumerate(numels)]
    total = sum(numels)
    want, got = random(total, dtype, 999), gpu.put(random(total, dtype, 999), 3)
    theirs = [gpu.put(x, i % 5) for i, x in enumerate(sources)]
    ops.cast_copy(sources, want.split(numels), accumulate=accumulate)
    with gpu.serving():
        ops.cast_copy(theirs, got.split(numels), accumulate=accumulate)
    assert same(got, want) and intact(got) and all(map(intact, theirs))


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_casts_round_as_torch_does(gpu: Gpu, source: torch.dtype, target: torch.dtype) -> None:
    """Every value of a narrow dtype, and floats beside and between its neighbours."""
    narrow = target if source is torch.float32 and target is not torch.float32 else source
    if narrow is torch.float32:
        x = random(50_000, source)
    else:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(narrow).to(source)
        if source is torch.float32:
            half = 1 << (15 if target is torch.bfloat16 else 12)
            bits = x.view(torch.int32)
            x = torch.cat([(bits + k).view(torch.float32) for k in (-half, -1, 0, 1, half - 1, half, half + 1)])
    got = gpu.put(torch.zeros(x.numel(), dtype=target))
    with gpu.serving():
        ops.cast_copy([gpu.put(x)], [got])
    assert same(got, x.to(target))


def test_a_source_may_have_any_strides(gpu: Gpu) -> None:
    x = random(60, torch.float32).view(6, 10)
    got = gpu.put(torch.zeros(10, 6, dtype=torch.bfloat16))
    with gpu.serving():
        ops.cast_copy([gpu.put(x).T], [got])
    assert same(got, x.T.to(torch.bfloat16))


def test_sources_and_targets_that_do_not_pair_up_are_refused() -> None:
    a = torch.zeros(4)
    for sources, targets in [
        ([a], []),
        ([a], [torch.zeros(5)]),
        ([a], [torch.zeros(8)[::2]]),
        ([a.double()], [a]),
        ([a, a], [a.clone(), a.half()]),
    ]:
        with pytest.raises((AssertionError, ValueError)):
            ops.cast_copy(sources, targets)


@pytest.mark.parametrize("accumulate", [False, True])
def test_casts_without_a_gpu_are_float32_rounded_once(accumulate: bool) -> None:
    x, y = random(1000, torch.float16), random(1000, torch.bfloat16, 1)
    exact = x.float() + (y.float() if accumulate else 0)
    ops.cast_copy([x], [y], accumulate=accumulate)
    assert torch.equal(y, exact.bfloat16())


# -- digests --------------------------------------------------------------------------------------------------


def check_digest(gpu: Gpu) -> None:
    """Sizes around a word and a tile of 4,096 words, at aligned and odd addresses, far behind the first word."""
    for size in (0, 1, 7, 8, 9, 2053, (1 << 15) - 1, (1 << 15) + 8, 3 * (1 << 15) + 5):
        x = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
        wanted = ops.digest(x, 8 << 40)
        for skew in (0, 3, 8):
            on_gpu = gpu.put(x, skew)
            with gpu.serving():
                got = ops.digest(on_gpu, 8 << 40)
            assert got.device == on_gpu.device and torch.equal(got.cpu(), wanted), (size, skew)


def test_a_digest_is_that_of_the_cpu(gpu: Gpu) -> None:
    check_digest(gpu)


# -- the library ----------------------------------------------------------------------------------------------


def test_every_function_returns_the_error_of_cuda(emulated: Path) -> None:
    handle = _cuda_library.load(emulated)
    array = (_cuda_library.Array * 1)(_cuda_library.Array(None, 0, 9))
    copy = (_cuda_library.CudaCopy * 1)(_cuda_library.CudaCopy(None, None, 0, 9))
    args = ctypes.byref(_cuda_library.UpdateArgs(step=1))
    arrays = ctypes.byref(_cuda_library.ArrayPointers(param_dtype=9))
    missing = 1  # the emulation has device 0 alone
    for device, code in ((missing, 101), (0, -1)):
        assert handle.ze_cuda_update(device, None, arrays, 0, args) == code
        assert handle.ze_cuda_squared_norm(device, None, array, 1, None, None) == code
        assert handle.ze_cuda_cast(device, None, copy, 1, 0, 1.0, 0) == code
    buffer = _cuda_library.CudaBuffer(_cuda_library.ArrayPointers(param_dtype=9), None, 0, 0)
    assert handle.ze_cuda_update_buffers(missing, None, ctypes.byref(buffer), 1) == 101
    assert handle.ze_cuda_update_buffers(0, None, ctypes.byref(buffer), 1) == -1
    unknown_rule = ctypes.byref(_cuda_library.UpdateArgs(step=1, rule=len(RULES)))
    assert handle.ze_cuda_update(0, None, ctypes.byref(_cuda_library.ArrayPointers()), 0, unknown_rule) == -1
    for code, message in ((0, "success"), (-1, "dtype"), (35, "update the driver"), (209, "ZEROENGINE_CUDA_ARCHIT")):
        assert message in handle.ze_cuda_message(code).decode()


def check_everything(gpu: Gpu) -> None:
    for rule, moments in STATES:
        check_update(gpu, rule, moments, [0, 2 * TILE + 77])
        check_edges(gpu, rule, moments)
    check_table(gpu, [[0, 1, 7, TILE + 9, 3 * TILE, 3 * TILE + 100]], [[1.0, 0.0], [1.0, 1.0]], [False, True])
    check_norm(gpu, [random(NORM_TILE * 70 + 77, torch.bfloat16), random(1001, torch.float32)])
    check_digest(gpu)
    test_many_tensors_are_cast_in_one_launch(gpu, torch.float16, True)


MISTAKES = {
    "another order of products": ("../rules.h", "one_minus_beta2 * g * g", "one_minus_beta2 * (g * g)"),
    "other random bits": ("update_elements.h", "0x846ca68b", "0x846ca68d"),
    "a carry into infinity": ("update_elements.h", "magnitude_of(value) < kLargestBf16 ?", "true ?"),
    "elements before a segment": ("update_elements.h", "begin <= element && element < end", "element < end"),
    "elements behind a segment": ("update_elements.h", "begin <= element && element < end", "begin <= element"),
    "a step that ignores overflow": (
        "update.cu",
        "const bool overflow = factor->overflow != 0;",
        "bool overflow = false;",
    ),
    "no barrier before a maximum": ("update.cu", "have been read.\n  __syncthreads();", "have been read."),
    "a maximum that forgets a warp": ("update.cu", "float_of(a > b ? a : b)", "float_of(a)"),
    "a scale of one moment for both": ("update.cu", "scale_of(largest[k])", "scale_of(largest[0])"),
    "a sign that is lost": ("update_elements.h", "kSigned && value < 0 ? -code : code", "code"),
    "a small value that becomes zero": ("update_elements.h", "fraction > 0 ? 1.0f : 0.0f", "0.0f"),
    "a range too far": ("update_elements.h", "n * 11 >> 5", "(n + 1) * 11 >> 5"),
    "no barrier before a sum": ("device.h", "x;\n  __syncthreads();", "x;"),
    "no barrier after a sum": ("device.h", "__syncthreads();\n  return x;", "return x;"),
    "a sum that forgets a warp": ("device.h", "int i = 1; i < kCount / kWarp", "int i = 2; i < kCount / kWarp"),
    "a norm that drops its tail": ("norm.cu", "(numel + kTile - 1) / kTile", "(numel + kTile / 2) / kTile"),
    "a digest off its array": ("digest.cu", "i < 8 && i < rest", "i < 8"),
    "a digest without places": (
        "digest.cu",
        "load<uint64_t>(x + 8 * i), first_word + i",
        "load<uint64_t>(x + 8 * i), first_word",
    ),
    "a cast off its array": ("cast.cu", "n / kPack * kPack", "(n + kPack - 1) / kPack * kPack"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_emulator_notices_mistakes(mistake: str, tmp_path: Path) -> None:
    """The checks above fail on kernels that are wrong."""
    name, right, wrong = MISTAKES[mistake]
    shutil.copytree(cuda.ROOT / "csrc", tmp_path / "csrc")
    source = tmp_path / "csrc/cuda" / name
    assert source.read_text().count(right) == 1
    source.write_text(source.read_text().replace(right, wrong))
    assert run_checks(cuda.build_emulated(tmp_path, tmp_path, "-Wno-error")) != 0


@pytest.mark.slow
def test_the_emulator_reports_no_mistake_in_the_kernels(emulated: Path) -> None:
    assert run_checks(emulated) == 0


def run_checks(path: Path) -> int:
    """0 where ``check_everything`` passes. In a process of its own: some mistakes write where they should not."""
    code = "import sys, pathlib, tests.ops.test_cuda_kernels as t\n"
    code += "t.check_everything(t.emulating(pathlib.Path(sys.argv[1])))"
    return subprocess.run([sys.executable, "-c", code, path], cwd=cuda.ROOT, capture_output=True).returncode


# -- quantized packets ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_packets_and_their_sums_have_the_bits_of_the_cpu(gpu: Gpu, bits: int) -> None:
    """Two slices of odd lengths, one with a NaN, with and without what earlier packets lost."""
    for dtype in ops.DTYPE_CODES:
        for numel in (0, 1, 7, 256, 1003):
            x = (torch.randn(2 * numel, generator=torch.Generator().manual_seed(numel)) * 100).to(dtype)
            x[-1:] = float("nan")
            earlier = [None, torch.randn(2 * numel).bfloat16()]
            target = torch.randn(numel).to(dtype)
            for lost in earlier:
                kept = None if lost is None else lost.clone()
                packets = torch.empty(2 * ops.packet_bytes(numel, bits), dtype=torch.uint8)
                ops.quantize(x, packets, bits=bits, num_slices=2, error=kept, error_decay=0.8)
                total = target.clone()
                ops.dequantize_sum(total, packets, bits=bits, num_sources=2, accumulate=True)
                own_kept, own_total = None if lost is None else gpu.put(lost), gpu.put(target)
                own_packets, own_x = gpu.put(torch.zeros_like(packets)), gpu.put(x)
                with gpu.serving():
                    ops.quantize(own_x, own_packets, bits=bits, num_slices=2, error=own_kept, error_decay=0.8)
                    ops.dequantize_sum(own_total, own_packets, bits=bits, num_sources=2, accumulate=True)
                assert torch.equal(own_packets.cpu(), packets), (dtype, numel)
                assert same(own_total, total), (dtype, numel)
                assert kept is None or (own_kept is not None and torch.equal(own_kept.cpu(), kept))
