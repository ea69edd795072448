"""Memory that NCCL is told of: which, by whom, and where it says what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.transports.pools import Backend, OldBackend, Pool, RefusingBackend, pretended
from tests.distributed.ranks import run_ranks
from tests.emulated import cpu_alone
from zeroengine.comm.group import Group
from zeroengine.comm.transports.nccl import NativeTransport
from zeroengine.comm.transports.nccl_memory_pool import LEAST_SYMMETRIC, RegisteredPool
from zeroengine.errors import DivergenceError, ZeroEngineError

pytestmark = cpu_alone("where memory would lie is modelled")
CPU = torch.device("cpu")


def start(how: Any) -> tuple[Group, NativeTransport]:
    group = Group(None, CPU)
    transport = group.transport("auto", 30.0, how)
    assert isinstance(transport, NativeTransport)
    return group, transport


def registering(how: Any) -> tuple[list[Any], list[Any]]:
    dist.init_process_group("gloo")
    with pretended():
        group, transport = start(how)
        if group.symmetric:
            group.reserve({"gather": 5000, "reduce": 3000})
        segments = [list(pool.segments) for pool in Pool.all]
        transport.close()
        transport.close()
        return [(b.mem_allocator, b.registered, b.deregistered) for b in Backend.all], segments


@pytest.mark.parametrize("how", [True, "symmetric"])
def test_each_channel_has_a_pool_that_its_own_communicator_alone_registers_once(how: Any) -> None:
    said, had = ({"symm": True}, 1) if how == "symmetric" else ({}, 0)
    each = [(name, [(name, said, had)], [name]) for name in ("group 0", "group 1")]
    segments = [[8192], [4096]] if how == "symmetric" else [[], []]
    for found in run_ranks(2, registering, how):
        assert found == (each, segments), "a window is registered when there is all that it is to hold"


def allocating() -> list[list[int]]:
    dist.init_process_group("gloo")
    with pretended():
        _, transport = start(True)
        gather, reduce = Pool.all
        found: list[list[int]] = []

        def note() -> None:
            found.append([*(size for size, _ in gather.log), 0, *(size for size, _ in reduce.log)])
            gather.log.clear(), reduce.log.clear()

        kept = [transport.empty(1024, torch.float32, channel, sent=False) for channel in ("gather", "reduce")]
        note()
        buffer = transport.buffer(2048, torch.float32)
        buffer.free()
        buffer.prepare()
        note()
        shard, full = torch.ones(512), transport.empty(1024, torch.float32, "reduce").zero_()
        note()
        transport.reduce.reduce_scatter(kept[1][:512], full, "received where it is kept").wait_stream()
        note()
        for _ in range(2):
            transport.reduce.reduce_scatter(shard, full, "received beside it, and added", accumulate=True).wait_stream()
        transport.reduce.reduce_scatter(shard.bfloat16(), full, "received beside it, and cast").wait_stream()
        note()
        for channel in ("gather", "reduce", None):
            kept[0].untyped_storage().resize_(0)
            transport.refill(kept[0], channel)  # type: ignore[arg-type]
            note()
        return found


def test_memory_comes_from_the_pool_of_the_channel_that_moves_it() -> None:
    spare = [2048, -2048]
    expected = [
        [4096, 0, 4096],
        [8192, -8192, 8192, 0],
        [0, 4096],
        [0],
        [0, *spare, *spare, *spare],
        [-4096, 4096, 0],
        [-4096, 0, 4096],
        [0, -4096],
    ]
    assert run_ranks(2, allocating) == [expected, expected]


def failing(backend: type[Backend], how: Any, on: int) -> tuple[str, int]:
    dist.init_process_group("gloo")
    with pretended(backend if dist.get_rank() == on else Backend), pytest.raises(ZeroEngineError) as error:
        group, _ = start(how)
        group.reserve({"gather": 1, "reduce": 1})
    return str(error.value), len(Backend.all)


@pytest.mark.parametrize("backend", [OldBackend, RefusingBackend])
@pytest.mark.parametrize("on", [0, 1])
def test_where_a_rank_has_no_windows_all_say_what_to_write(backend: type[Backend], on: int) -> None:
    for rank, (message, _) in enumerate(run_ranks(2, failing, backend, "symmetric", on)):
        assert message.startswith("" if rank == on else f"rank {on} failed to register memory with NCCL: ")
        what = f"comm.register_buffers: torch {torch.__version__} and its NCCL cannot register symmetric memory ("
        assert what in message and message.endswith("): write true or false")
        assert "unexpected keyword" in message if backend is OldBackend else "(NCCL error: invalid usage)" in message


def registering_without_nccl(symmetric: bool) -> str:
    dist.init_process_group("gloo")
    with pytest.raises(ZeroEngineError) as error:
        RegisteredPool(dist.new_group(), CPU, symmetric)
    return str(error.value)


@pytest.mark.parametrize("symmetric", [False, True])
def test_where_nothing_can_be_registered_it_says_what_to_write(symmetric: bool) -> None:
    message = run_ranks(1, registering_without_nccl, symmetric)[0]
    assert message.startswith("comm.register_buffers: torch ")
    assert message.endswith(f"): write {'true or ' * symmetric}false")


class Segments:
    """Stands in for ``torch.cuda.MemPool``: tells what segments there are."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def snapshot(self) -> list[dict[str, int]]:
        return [{"address": t.data_ptr(), "total_size": t.nbytes} for t in self.tensors]


def test_segments_are_numbered_as_they_are_taken_wherever_they_lie() -> None:
    pool = object.__new__(RegisteredPool)
    pool.symmetric, pool._segments = True, []
    tensors = [torch.empty(LEAST_SYMMETRIC, dtype=torch.uint8) for _ in range(5)]
    other, first, *tensors = sorted(tensors, key=torch.Tensor.data_ptr, reverse=True)
    pool._pool = Segments([first])
    pool._know(first[64:])
    for tensor in tensors:
        pool._pool.tensors.append(tensor)
        pool._know(tensor)
        pool._know(tensor[128:])
    assert [pool.place(tensor[512:]) for tensor in (first, *tensors)] == [(number, 512) for number in range(4)]
    assert pool.place(other) is None


def asking(how: Any) -> list[bool]:
    dist.init_process_group("gloo")
    with pretended():
        _, transport = start(how)
        work = transport.gather.all_gather(transport.empty(2, torch.float32, "gather"), torch.ones(2), "blocks.0")
        work.wait_stream()
        return [work.done(), *(transport.gather.reusable(work, patience) for patience in (0.0, 1.0))]


def test_which_memory_is_used_depends_on_no_clock_where_it_must_be_the_same_on_all_ranks() -> None:
    assert run_ranks(1, asking, True)[0] == [True, True, True]
    assert run_ranks(1, asking, "symmetric")[0] == [True, False, True]


def lying_elsewhere() -> str:
    dist.init_process_group("gloo")
    with pretended():
        group, transport = start("symmetric")
        group.reserve({"gather": 1 << 16, "reduce": 1 << 16})
        early = transport.empty(8, torch.float32, "gather") if transport.rank else None
        full, shard = (transport.empty(numel, torch.float32, "gather") for numel in (4, 2))
        transport.gather.all_gather(full, shard.zero_(), "blocks.0").wait_stream()
        transport.all_reduce_scalars(torch.ones(1, dtype=torch.float64), "norm")
        with pytest.raises(DivergenceError) as error:
            transport.check_order()
        del early
        return str(error.value)


def test_ranks_whose_memory_lies_elsewhere_find_out() -> None:
    for message in run_ranks(2, lying_elsewhere):
        assert message.endswith(' With "register_buffers": "symmetric" their memory may differ, too: write true.')
