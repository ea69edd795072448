"""Ranks of several hosts: what goes between hosts, and errors that name the ranks of all of them."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.ranks import run_ranks
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.transports.choose import open_transport
from zeroengine.comm.transports.gloo import GlooChannel, GlooWork
from zeroengine.comm.transports.two_level import TwoLevelTransport
from zeroengine.errors import DivergenceError
from zeroengine.partition.degrees import Degrees

CPU = torch.device("cpu")


def open_on_hosts(*sizes: int, timeout: float = 60.0) -> Transport:
    dist.init_process_group("gloo")
    imagine_hosts(*sizes)
    return open_transport(Group(None, CPU), "auto", timeout)


def bytes_between_hosts(ranks_per_host: int) -> dict[str, int]:
    """What this rank sends to other hosts, in shards: of each operation over all ranks, or within the host."""
    transport = open_on_hosts(ranks_per_host)
    assert transport.name == "two-level"
    world_size, numel = transport.world_size, 12_000
    sent: dict[str, int] = {}
    exchange = GlooChannel.exchange

    def count(self: GlooChannel, kind: str, label: str, tensors: Any, *arguments: Any) -> GlooWork:
        host = transport.rank // ranks_per_host
        nbytes = sum(tensor.nbytes for rank, tensor in tensors.items() if rank // ranks_per_host != host)
        sent[label] = sent.get(label, 0) + nbytes
        return exchange(self, kind, label, tensors, *arguments)

    first = transport.rank // ranks_per_host * ranks_per_host
    node = tuple(range(first, first + ranks_per_host))
    with mock.patch.object(GlooChannel, "exchange", count):
        shard = transport.empty(numel, torch.float32, "gather").fill_(transport.rank)
        whole, part = torch.empty(numel * world_size), torch.empty(numel * ranks_per_host)
        transport.gather.all_gather(whole, shard, "gather").wait_host()
        assert whole.view(world_size, -1)[:, 0].tolist() == list(range(world_size))
        transport.gather.all_gather(part, shard, "gather of the host", node).wait_host()
        full = transport.empty(numel * world_size, torch.float32, "reduce").fill_(1)
        total = torch.empty(numel)
        transport.reduce.reduce_scatter(total, full, "reduce").wait_host()
        assert total.eq(world_size).all()
        slice_of_host = torch.empty(numel * world_size // ranks_per_host)
        levels = (ranks_per_host,)
        transport.reduce.reduce_scatter(slice_of_host, full, "reduce of the host", levels=levels).wait_host()
        assert slice_of_host.eq(world_size).all()
        transport.reduce.all_reduce(full, "all-reduce").wait_host()
        assert full.eq(world_size).all()
    transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64), "end")
    return {label: nbytes // shard.nbytes for label, nbytes in sent.items()}


@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 2), (3, 2)])
def test_each_byte_goes_to_another_host_once_per_host(num_hosts: int, ranks_per_host: int) -> None:
    for sent in run_ranks(num_hosts * ranks_per_host, bytes_between_hosts, ranks_per_host):
        assert sent == {
            # A shard, and a sum, to the counterpart on each other host.
            "gather": num_hosts - 1,
            "reduce": num_hosts - 1,
            # A slice has a shard of each host, and is summed by a ring's 2 (H - 1) / H of its bytes.
            "reduce of the host": 2 * (num_hosts - 1),
            "all-reduce": 2 * (num_hosts - 1),
        }


def reduce_with_unfit_degrees() -> tuple[str, float]:
    transport = open_on_hosts(3)
    transport.open_groups((Degrees(2, 2, 2),), Group(None, CPU))
    full = transport.empty(20, torch.float32, "reduce").copy_(torch.arange(20.0) * (transport.rank + 1))
    half = torch.empty(10)
    transport.reduce.reduce_scatter(half, full, "unit", levels=(2,)).wait_host()
    shard = transport.empty(10, torch.float32, "gather").copy_(half)
    whole = transport.buffer(20, torch.float32)
    first = transport.rank // 2 * 2
    transport.gather.all_gather(whole.tensor, shard, "unit", (first, first + 1)).wait_host()
    assert torch.equal(whole.tensor, torch.arange(20.0) * 21)
    return transport.name, transport.all_reduce_scalars(torch.ones(1, dtype=torch.float64), "norm").item()


def test_degrees_that_straddle_hosts_go_directly_between_ranks() -> None:
    assert run_ranks(6, reduce_with_unfit_degrees) == [("two-level", 6.0)] * 6


# -- errors -----------------------------------------------------------------------------------------


def until_error(what: str) -> tuple[str, float]:
    transport = open_on_hosts(2, timeout=3.0)
    shard = transport.empty(1024, torch.float32, "gather").zero_()
    full = torch.empty(4096)
    start = time.monotonic()
    try:
        for step in range(20):
            label = "blocks.0"
            if step == 5 and transport.rank == 3:
                if what == "ends":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "stops":
                    time.sleep(14)
                if what == "differs":
                    label = "blocks.1"
            transport.gather.all_gather(full, shard, label).wait_host()
            transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64), "norm")
    except DivergenceError as error:
        time.sleep(6)
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize(
    ("what", "within_host", "between_hosts"),
    [
        pytest.param("ends", r"rank 3 has ended", r"rank 3 \(host-1\) does not answer", marks=pytest.mark.slow),
        pytest.param(
            *("stops", r"has waited 3 s \(comm.timeout_seconds\) for .* \(number \d+\)", r"rank 3 \(host-1\)"),
            marks=pytest.mark.slow,
        ),
        ("differs", r"run different units: rank 2 is at gather blocks.0 .* rank 3 at gather blocks.1", r"blocks.1"),
    ],
)
def test_errors_name_ranks_of_all_hosts_and_units(what: str, within_host: str, between_hosts: str) -> None:
    missing = (3,) if what == "ends" else ()
    answers = run_ranks(4, until_error, what, missing=missing)
    for rank in (0, 1, 2):
        message, _ = answers[rank]
        assert re.search(r"blocks.0|norm|numbers", message), message
        assert re.search(within_host if rank == 2 else between_hosts, message), (rank, message)


# -- progress ---------------------------------------------------------------------------------------


def send_without_waiting() -> list[int]:
    """The exchanges of the first rank of a host after its own reduce, its peer's, and a call of ``progress``."""
    transport = open_on_hosts(2)
    full = transport.empty(4000, torch.float32, "reduce").fill_(1)
    counts = []
    with mock.patch.object(GlooChannel, "exchange", autospec=True, side_effect=GlooChannel.exchange) as exchange:
        works = []
        for local in range(2):
            if transport.rank % 2 == local:
                works.append(transport.reduce.reduce_scatter(torch.empty(1000), full, "unit"))
            counts.append(exchange.call_count)
            dist.barrier()
        transport.progress()
        counts.append(exchange.call_count)
        works[0].wait_host()
    transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64), "end")
    return counts


def test_a_sum_goes_to_other_hosts_as_soon_as_the_ranks_of_the_host_are_ready() -> None:
    counts = run_ranks(4, send_without_waiting)
    assert counts[0] == counts[2] == [0, 0, 1]


def progress_of_a_backward() -> tuple[int, int]:
    dist.init_process_group("gloo")
    imagine_hosts(2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    engine = zeroengine.initialize(model, config={"zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD"}})
    loss = engine(torch.ones(1, 4)).sum()
    with mock.patch.object(TwoLevelTransport, "progress", autospec=True, side_effect=TwoLevelTransport.progress) as spy:
        engine.backward(loss)
    engine.step()
    engine.close()
    return spy.call_count, len(list(model.parameters()))


def test_a_backward_gives_the_transport_a_turn_at_each_gradient() -> None:
    for calls, num_params in run_ranks(4, progress_of_a_backward):
        assert calls >= num_params
