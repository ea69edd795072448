"""The GPU that the CPU plays notices what a real one would not take."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tests.emulated import wanted
from tests.ops.cuda import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(wanted() != "emulated", reason="no emulated GPU")]


def test_memory_of_both_sides_in_one_operation_is_an_error() -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    for mix in (lambda: here + there, lambda: there.add_(here), lambda: torch.cat([here, there]), lambda: here @ there):
        with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
            mix()
    assert (there * 2.0 + torch.tensor(1.0)).tolist() == [3.0, 3.0, 3.0], "a number may come from anywhere"


def test_waiting_is_an_error_where_it_is_forbidden() -> None:
    x, pinned, ordinary = torch.ones(3, device="cuda"), torch.ones(3).pin_memory(), torch.ones(3)
    assert pinned.is_pinned() and not ordinary.is_pinned()
    with no_waiting():
        pinned.copy_(x * 2, non_blocking=True)
        x.copy_(pinned, non_blocking=True)
        for wait in (
            lambda: x[0].item(),
            lambda: bool(x.sum()),
            lambda: x.cpu(),
            lambda: x.nonzero(),
            lambda: x.copy_(pinned),
            lambda: x.copy_(ordinary, non_blocking=True),
        ):
            with pytest.raises(RuntimeError, match="synchronizing"):
                wait()
    assert x.tolist() == [2.0, 2.0, 2.0]


def test_backward_runs_on_a_thread_of_the_device() -> None:
    model, threads = nn.Linear(2, 2, device="cuda"), []
    model.weight.register_post_accumulate_grad_hook(lambda _: threads.append(threading.get_ident()))
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    assert threads and threads[0] != threading.get_ident()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[1.0, 1.0]] * 2


def test_a_graph_is_done_at_its_replay() -> None:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 3
        x.add_(1)
    assert x.tolist() == [1.0, 1.0, 1.0]
    for expected in (3.0, 6.0):
        graph.replay()
        assert y.tolist() == [expected] * 3


def test_device_memory_is_counted_and_starts_as_nan() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.empty(1000, device="cuda")
    assert x.isnan().all()
    assert torch.cuda.memory_allocated() - before == 4096
    x.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == before < torch.cuda.max_memory_allocated()
