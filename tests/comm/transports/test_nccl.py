"""NCCL's transport, whose collectives Gloo stands in for: what it finds out late, and when memory may be reused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.transports.choose import open_nccl
from zeroengine.comm.transports.nccl import NCCLTransport
from zeroengine.errors import DivergenceError

CPU = torch.device("cpu")


def native() -> NCCLTransport:
    dist.init_process_group("gloo")
    groups = [dist.new_group(), dist.new_group()]
    return NCCLTransport(*groups, CPU, None)


def gather(transport: Transport, label: str) -> None:
    full = transport.empty(2 * transport.world_size, torch.float32)
    transport.gather.all_gather(full, torch.full((2,), float(transport.rank)), label).wait_stream()
    assert full.tolist() == [0, 0, 1, 1]


def diverging(asked: bool) -> tuple[str, list[list[float]]]:
    transport = native()
    values = torch.ones(3, dtype=torch.float64)
    sums = []
    for label in ("blocks.0", "blocks.1"):
        gather(transport, label)
        sums.append(transport.all_reduce_scalars(values, "norm").tolist())
        transport.check_order()
    gather(transport, "blocks.2" if transport.rank else "head")
    sums.append(transport.all_reduce_scalars(values, "norm").tolist())  # nobody has looked yet
    for _ in range(2):  # and again
        with pytest.raises(DivergenceError) as error:
            if asked:
                transport.check_order()
            else:
                transport.all_reduce_scalars(values, "norm")
    return str(error.value), sums


@pytest.mark.parametrize("asked", [True, False])
def test_ranks_with_different_orders_raise_at_check_order_or_at_the_next_sum(asked: bool) -> None:
    for rank, (message, sums) in enumerate(run_ranks(2, diverging, asked)):
        assert sums == [[2.0, 2.0, 2.0]] * 3
        assert message.startswith(
            f"the ranks have run different units since the start: rank {rank} was at gather "
            f"{'blocks.2' if rank else 'head'} (number 3), norm (number 3). Every rank must run the same units in "
            "the same order. "
        )
        assert '"units": ["layers.*"]' in message


class Pending:
    """A collective that is through when told so."""

    def __init__(self) -> None:
        self.completed = False
        self.waits = 0

    def wait_stream(self) -> None:
        self.waits += 1

    wait_host = wait_stream

    def done(self) -> bool:
        return self.completed


def asks() -> list[Any]:
    channel, work = native().reduce, Pending()
    found = [channel.reusable(work, 0.0), work.waits, channel.reusable(work, 1.0), work.waits]
    work.completed = True
    return [*found, channel.reusable(work, 0.0), work.waits]


def test_reusable_without_a_timeout_does_not_wait_for_a_bucket() -> None:
    assert run_ranks(1, asks)[0] == [False, 0, True, 1, True, 1]


def accumulates() -> tuple[list[float], bool]:
    transport = native()
    shard, full = torch.ones(2), transport.empty(4, torch.bfloat16).fill_(1 + transport.rank)
    work = transport.reduce.reduce_scatter(shard, full, "blocks.0", accumulate=True)
    work.wait_stream()
    work.wait_stream()
    return shard.tolist(), work.done()


def test_a_sum_is_added_once_in_the_dtype_of_what_is_kept() -> None:
    assert run_ranks(2, accumulates) == [([4.0, 4.0], True)] * 2


def stalls() -> tuple[str, float]:
    """Rank 1 stays away; the hosts of the others run ahead, and wait for nothing."""
    transport = open_nccl(Group(None, CPU), 2.0)
    # The short timeout also holds for the gather in which rank 1 takes part: by then all ranks are here.
    dist.barrier(transport.gather.group)
    rank, store, began = transport.rank, dist.distributed_c10d._get_default_store(), time.monotonic()
    transport.gather.all_gather(transport.empty(6, torch.float32), torch.ones(2), "blocks.4").wait_stream()
    message, labels = "", iter(["blocks.7", "blocks.6", "blocks.5"])
    while rank != 1 and not message and time.monotonic() < began + 30:
        try:
            if label := next(labels, None):
                transport.reduce.all_reduce(torch.ones(6), label)
            else:
                time.sleep(0.2)
                transport.gather.all_gather(transport.empty(6, torch.float32), torch.ones(2), "blocks.3")
        except DivergenceError as error:
            message = str(error)
    seconds = time.monotonic() - began
    store.add("given up", rank != 1)
    while rank != 2 and store.add("given up", 0) < 2:  # the store is rank 0's, and the answer rank 1's
        time.sleep(0.1)
    time.sleep(0.5 * (rank == 0))
    transport.close()
    return message, seconds


def test_an_absent_rank_is_named_although_no_rank_waits_for_the_device() -> None:
    for rank, (message, seconds) in enumerate(run_ranks(3, stalls)):
        if rank != 1:
            assert message.startswith(
                f"rank {rank} has waited 2 s (comm.timeout_seconds) for reduce blocks.7 (number 1): rank 1 is at "
                "gather blocks.4 (number 1), the others wait at reduce blocks.7 (number 1)."
            )
            assert 2.0 < seconds < 15
