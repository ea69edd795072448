"""Memory that is registered with NCCL: which pool registers it, and the errors where that is impossible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.transports.pools import Backend, Pool, RefusingBackend, pretended
from tests.distributed.ranks import run_ranks
from tests.emulated import cpu_alone
from zeroengine.comm.group import Group
from zeroengine.comm.transports.choose import open_nccl
from zeroengine.comm.transports.nccl import NCCLTransport, RegisteredPool
from zeroengine.errors import ZeroEngineError

pytestmark = cpu_alone("where memory would lie is modelled")
CPU = torch.device("cpu")


def start() -> NCCLTransport:
    transport = open_nccl(Group(None, CPU), 30.0, True)
    assert isinstance(transport, NCCLTransport)
    return transport


def registering() -> list[Any]:
    dist.init_process_group("gloo")
    with pretended():
        transport = start()
        transport.close()
        transport.close()
        return [(b.mem_allocator, b.registered, b.deregistered) for b in Backend.all]


def test_each_channel_has_a_pool_that_its_own_communicator_alone_registers_once() -> None:
    for found in run_ranks(2, registering):
        assert found == [(name, [name], [name]) for name in ("group 0", "group 1")]


def allocating() -> list[list[int]]:
    dist.init_process_group("gloo")
    with pretended():
        transport = start()
        gather, reduce = Pool.all
        found: list[list[int]] = []

        def note() -> None:
            found.append([*(size for size, _ in gather.log), 0, *(size for size, _ in reduce.log)])
            gather.log.clear(), reduce.log.clear()

        kept = [transport.empty(1024, torch.float32, channel, sent=False) for channel in ("gather", "reduce")]
        note()
        buffer = transport.buffer(2048, torch.float32)
        buffer.free()
        buffer.allocate()
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


def failing(on: int) -> str:
    dist.init_process_group("gloo")
    with pretended(RefusingBackend if dist.get_rank() == on else Backend), pytest.raises(ZeroEngineError) as error:
        start()
    return str(error.value)


@pytest.mark.parametrize("on", [0, 1])
def test_where_one_rank_cannot_register_memory_all_say_what_to_write(on: int) -> None:
    for rank, message in enumerate(run_ranks(2, failing, on)):
        assert message.startswith("" if rank == on else f"rank {on} failed to register memory with NCCL: ")
        what = f"comm.register_buffers: torch {torch.__version__} and its NCCL cannot register memory ("
        assert what in message and message.endswith("(NCCL error: invalid usage): write false")


def registering_without_nccl() -> str:
    dist.init_process_group("gloo")
    with pytest.raises(ZeroEngineError) as error:
        RegisteredPool(dist.new_group(), CPU)
    return str(error.value)


def test_where_nothing_can_be_registered_the_error_says_what_to_write() -> None:
    message = run_ranks(1, registering_without_nccl)[0]
    assert message.startswith("comm.register_buffers: torch ") and message.endswith("): write false")
