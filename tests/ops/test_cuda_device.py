"""On a GPU: nobody waits, streams are obeyed, and a CUDA graph captures the whole update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cuda import need_library, no_waiting
from tests.ops.test_cuda_kernels import GROUPS
from tests.ops.test_update import State, assert_same_bits
from zeroengine import ops
from zeroengine.errors import ZeroEngineError
from zeroengine.ops import SegmentList, UpdateArrays, UpdateSegment, UpdateTable, _cuda_library

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

N = 300_000
BUFFER = SegmentList(
    [UpdateSegment(0, 1001, 0, 0), UpdateSegment(1001, 200_000, 1, 1), UpdateSegment(200_007, N, 2, 0)]
)


@pytest.fixture(autouse=True)
def library() -> None:
    need_library()


def moved(state: State, device: str) -> State:
    copy = State(0)
    for name in ("param", "grad", "copy"):
        setattr(copy, name, getattr(state, name).to(device, copy=True))
    copy.moments, copy.scales = ([x.to(device, copy=True) for x in which] for which in (state.moments, state.scales))
    return copy


class Step:
    """Norm, factor, update and copy, as the engine runs them."""

    def __init__(self, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.state = moved(State(N, torch.bfloat16, torch.bfloat16, dtype), device)
        self.table = UpdateTable([BUFFER], len(GROUPS), 2, self.state.param.device)
        self.table.set_groups(GROUPS)
        self.table.set_arrays(0, self.state.arrays())
        self.used = torch.ones(2, dtype=torch.float64, device=device)

    def run(self) -> Tensor:
        s = self.state
        norm = ops.squared_norms([s.grad])
        factor = ops.gradient_factor(norm, divisor=16.0, limit=1.0)
        self.table.prepare(factor, self.used)
        self.table.update(0, 1)
        return factor

    def feed(self, seed: int, bad: bool = False, lr: float = 0.01) -> None:
        grad = State(N, torch.bfloat16, seed=seed).grad
        grad[12345] = math.nan if bad else 1.0
        self.state.grad.copy_(grad)
        self.table.set_groups([{**group, "lr": lr} for group in GROUPS])


def test_a_step_does_not_make_the_host_wait() -> None:
    step = Step("cuda")
    step.run()
    with no_waiting():
        for lr in (0.1, 0.2):
            step.table.set_groups([{**group, "lr": lr} for group in GROUPS])
            step.run()
            bucket = torch.empty(N, device="cuda")
            ops.cast_copy([step.state.grad], [bucket])
    assert step.table.steps.tolist() == [3, 3]


def test_a_graph_replays_the_step_with_the_present_values() -> None:
    """Learning rate, step counts, gradient and overflow change between replays; bits are those of a run without a
    graph."""
    plain, captured = Step("cuda"), Step("cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # torch's way of warming up
        Step("cuda").run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        factor = captured.run()
    captured.table.steps.zero_()
    for seed, bad, lr in [(1, False, 0.1), (2, True, 0.2), (3, False, 0.3), (4, False, 0.3)]:
        for step in (plain, captured):
            step.feed(seed, bad, lr)
        want = plain.run()
        graph.replay()
        assert torch.equal(factor.nan_to_num(), want.nan_to_num()) and factor[2].item() == bad
        assert_same_bits(plain.state, captured.state)
    assert captured.table.steps.tolist() == plain.table.steps.tolist() == [3, 3]


def test_kernels_run_on_the_current_stream() -> None:
    """The update sees what its stream wrote before, and nothing waits for other streams."""
    step, want = Step("cuda"), Step("cpu")
    step.feed(7)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        step.state.grad.mul_(0.5)
        step.run()
    side.synchronize()
    want.feed(7)
    want.state.grad.mul_(0.5)
    want.run()
    torch.testing.assert_close(step.state.param.cpu(), want.state.param)


def test_an_update_reaches_large_offsets() -> None:
    """More elements than an int32 counts: the last ones are updated as a small buffer of them is."""
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("40 GB of GPU memory are needed")
    n = (1 << 31) + 5000
    arrays = [torch.zeros(n, device="cuda") for _ in range(4)]
    small = [torch.randn(5000, device="cuda") for _ in range(4)]
    small[3].square_()
    for x, y in zip(arrays, small, strict=True):
        x[-5000:] = y
    hyper: dict[str, Any] = dict(step=1, lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    for param, grad, *moments in (arrays, small):
        ops.update_step("adamw", UpdateArrays(param, grad, tuple(moments)), **hyper)
    assert torch.equal(arrays[0][-5000:], small[0])
    assert ops.squared_norm(arrays[1]).item() == pytest.approx(small[1].double().square().sum().item(), rel=1e-12)


def test_an_error_of_cuda_is_raised() -> None:
    device = torch.device("cuda", 0)
    handle = ops.cuda_library(device)
    assert handle is not None
    with pytest.raises(ZeroEngineError, match="ze_cuda_cast on cuda:0: a dtype that this kernel does not know"):
        _cuda_library.call(handle, "ze_cuda_cast", device, None, 0, 9, 1.0, 0)
