"""Ranks of several hosts: what goes between hosts, and errors that name the ranks of all of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.ranks import run_ranks
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.packing import ErrorFeedback, Packing
from zeroengine.comm.transports.choose import open_transport
from zeroengine.comm.transports.gloo import GlooChannel, GlooWork
from zeroengine.comm.transports.two_level import TwoLevelTransport
from zeroengine.errors import DivergenceError
from zeroengine.partition.degrees import Degrees, shard_index

CPU = torch.device("cpu")


def open_on_hosts(*sizes: int) -> Transport:
    dist.init_process_group("gloo")
    imagine_hosts(*sizes)
    return open_transport(Group(None, CPU), "auto", 60.0)


@contextlib.contextmanager
def sent_to_other_hosts(transport: Transport, ranks_per_host: int) -> Iterator[dict[str, int]]:
    """Yield the bytes that this rank sends to ranks of other hosts, by the label of the operation."""
    sent: dict[str, int] = {}
    exchange = GlooChannel.exchange

    def count(self: GlooChannel, kind: str, label: str, tensors: Any, *arguments: Any) -> GlooWork:
        host = transport.rank // ranks_per_host
        nbytes = sum(tensor.nbytes for rank, tensor in tensors.items() if rank // ranks_per_host != host)
        sent[label] = sent.get(label, 0) + nbytes
        return exchange(self, kind, label, tensors, *arguments)

    with mock.patch.object(GlooChannel, "exchange", count):
        yield sent


def bytes_between_hosts(ranks_per_host: int) -> dict[str, int]:
    """What this rank sends to other hosts, in shards: of each operation over all ranks, or within the host."""
    transport = open_on_hosts(ranks_per_host)
    assert transport.name == "two-level"
    world_size, numel = transport.world_size, 12_000
    first = transport.rank // ranks_per_host * ranks_per_host
    node = tuple(range(first, first + ranks_per_host))
    with sent_to_other_hosts(transport, ranks_per_host) as sent:
        shard = transport.empty(numel, torch.float32).fill_(transport.rank)
        whole, part = torch.empty(numel * world_size), torch.empty(numel * ranks_per_host)
        transport.gather.all_gather(whole, shard, "gather").wait_host()
        assert whole.view(world_size, -1)[:, 0].tolist() == list(range(world_size))
        transport.gather.all_gather(part, shard, "gather of the host", node).wait_host()
        full = transport.empty(numel * world_size, torch.float32).fill_(1)
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
    transport = open_on_hosts(3).open_groups((Degrees(2, 2, 2),), Group(None, CPU))
    full = transport.empty(20, torch.float32).copy_(torch.arange(20.0) * (transport.rank + 1))
    half = torch.empty(10)
    transport.reduce.reduce_scatter(half, full, "unit", levels=(2,)).wait_host()
    shard = transport.empty(10, torch.float32).copy_(half)
    whole = transport.buffer(20, torch.float32)
    first = transport.rank // 2 * 2
    transport.gather.all_gather(whole.tensor, shard, "unit", (first, first + 1)).wait_host()
    assert torch.equal(whole.tensor, torch.arange(20.0) * 21)
    return transport.name, transport.all_reduce_scalars(torch.ones(1, dtype=torch.float64), "norm").item()


def test_degrees_that_straddle_hosts_go_directly_between_ranks() -> None:
    assert run_ranks(6, reduce_with_unfit_degrees) == [("two-level", 6.0)] * 6


# -- packed sums ------------------------------------------------------------------------------------


class PackedSum(NamedTuple):
    """What a rank computes by packed sums, and what crosses between hosts."""

    error: float  # the largest error, in the largest error that packets may have
    digest: tuple[int, float]  # of the slice: its number, and the sum of its elements
    share: float  # of the bytes that an exact sum sends to other hosts


def half_steps(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return half of each element's step: that of its block of 256 elements."""
    largest = values.view(-1, 256).abs().amax(1) / (127 if bits == 8 else 7)
    return largest.repeat_interleave(256) / 2


def packed_sums(ranks_per_host: int, bits: int) -> list[PackedSum]:
    transport = open_on_hosts(ranks_per_host)
    sums = transport.packed_sums
    assert sums is not None
    world_size, numel = transport.world_size, 256 * 3 * 12
    gradients = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
    hosts = [torch.stack(gradients[first:][:ranks_per_host]).sum(0) for first in range(0, world_size, ranks_per_host)]
    # Each host's sum is packed once. Of more than two hosts that have the same slice, the sum is packed again.
    bound = sum(half_steps(host, bits) for host in hosts)
    total = torch.stack(hosts).sum(0)
    bound = 1.1 * bound + half_steps(total, bits) * (len(hosts) > 2) + 1e-6
    full = transport.empty(numel, torch.float32).copy_(gradients[transport.rank])
    found = []
    for levels in ((world_size,), (ranks_per_host,), ()):
        index = shard_index(transport.rank, levels)
        size = numel // (levels[0] if levels else 1)
        own = slice(index * size, (index + 1) * size)
        sent: dict[str, int] = {}
        for packing in (None, Packing(bits)):
            target = torch.full((size,), 2.0)
            with sent_to_other_hosts(transport, ranks_per_host) as counted:
                if packing is None:
                    work = transport.reduce.reduce_scatter(target, full, "exact", accumulate=True, levels=levels)
                else:
                    work = sums.reduce_scatter(target, full, "packed", True, levels, packing)
                work.wait_host()
            sent["exact" if packing is None else "packed"] = sum(counted.values())
        error = ((target - 2.0 - total[own]).abs() / bound[own]).max().item()
        digest = (index, target.double().sum().item())
        found.append(PackedSum(error, digest, sent["packed"] / sent["exact"]))
        transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64), "step")
    return found


@pytest.mark.parametrize(("num_hosts", "ranks_per_host", "bits"), [(2, 2, 8), (3, 2, 4)])
def test_packed_sums_are_within_half_a_step_of_each_host_and_send_a_quarter_or_an_eighth(
    num_hosts: int, ranks_per_host: int, bits: int
) -> None:
    by_rank = run_ranks(num_hosts * ranks_per_host, packed_sums, ranks_per_host, bits)
    for sums in zip(*by_rank, strict=True):
        # Ranks with the same slice have the same values.
        assert len(dict(found.digest for found in sums)) == len({found.digest for found in sums})
        for found in sums:
            assert 0.02 < found.error <= 1
            assert bits / 32 < found.share < bits / 32 * 1.05


def repeated_sums() -> tuple[float, float]:
    """The error of the mean of eight sums of the same gradients, with error feedback over that without."""
    transport = open_on_hosts(2)
    assert transport.packed_sums is not None
    full = transport.empty(4 * 4096, torch.float32)
    full.copy_(torch.randn(full.numel(), generator=torch.Generator().manual_seed(transport.rank)))
    exact, errors = torch.empty(4096), []
    transport.reduce.reduce_scatter(exact, full, "exact").wait_host()
    for feedback in (None, ErrorFeedback(decay=0.0, reset_interval=100)):
        packing, total = Packing(4, feedback), torch.zeros(4096)
        for _ in range(8):
            transport.packed_sums.reduce_scatter(total, full, "unit", accumulate=True, packing=packing).wait_host()
        errors.append((total / 8 - exact).abs().mean().item())
        # A rank keeps the errors of what it packs: the slices of the ranks of its number on each host.
        assert packing.nbytes == (0 if feedback is None else 2 * 2 * 4096)
    transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64), "end")
    return errors[0], errors[1]


def test_error_feedback_adds_what_a_host_lost_to_its_next_sum() -> None:
    for lost, kept in run_ranks(4, repeated_sums):
        assert kept < lost / 3


# -- errors -----------------------------------------------------------------------------------------


SHORT_S = 3.0  # comm.timeout_seconds once a rank has failed: from then on, every wait is to end in an error


def shorten_timeouts(transport: Transport) -> None:
    assert isinstance(transport, TwoLevelTransport)
    for between in transport._direct:
        between.timeout = timedelta(seconds=SHORT_S)
    for within in transport._local._channels:
        within._timeout = SHORT_S


def until_error(what: str) -> str:
    """Rank 3 ends, stops or runs another unit at its last gather. The others learn of it from their timeouts alone."""
    transport = open_on_hosts(2)
    store = dist.distributed_c10d._get_default_store()
    shard = transport.empty(1024, torch.float32).zero_()
    full, scalars = torch.empty(4096), torch.zeros(1, dtype=torch.float64)
    message = ""
    # Nothing fails in these steps, and a busy machine may take its time for them.
    for _ in range(5):
        transport.gather.all_gather(full, shard, "blocks.0").wait_host()
        transport.all_reduce_scalars(scalars, "norm")
    try:
        if transport.rank != 3:
            # Only rank 2 meets rank 3 without a timeout. The time that an exchange may take is set when it is issued.
            work = transport.gather.all_gather(full, shard, "blocks.0") if transport.rank == 2 else None
            store.wait(["rank 3 has failed"])
            shorten_timeouts(transport)
            (work or transport.gather.all_gather(full, shard, "blocks.0")).wait_host()
            transport.all_reduce_scalars(scalars, "norm")
        elif what == "differs":
            transport.gather.all_gather(full, shard, "blocks.1").wait_host()
    except DivergenceError as error:
        message = str(error)
    if transport.rank == 3:
        store.set("rank 3 has failed", "")
        if what == "ends":
            os.kill(os.getpid(), signal.SIGKILL)
    # Every rank answers the questions of the others, and rank 0 also has the store.
    store.set(f"rank {transport.rank} is done", "")
    store.wait([f"rank {rank} is done" for rank in range(3)])
    time.sleep(0.5 * (transport.rank == 0))
    return message


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
        message = answers[rank]
        assert re.search(r"blocks.0|norm|numbers", message), message
        assert re.search(within_host if rank == 2 else between_hosts, message), (rank, message)


# -- progress ---------------------------------------------------------------------------------------


def send_without_waiting() -> list[int]:
    """The exchanges of the first rank of a host after its own reduce, its peer's, and a call of ``progress``."""
    transport = open_on_hosts(2)
    full = transport.empty(4000, torch.float32).fill_(1)
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
    with mock.patch.object(TwoLevelTransport, "progress", autospec=True, side_effect=TwoLevelTransport.progress) as spy:
        engine = zeroengine.initialize(model, config={"zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD"}})
        loss = engine(torch.ones(1, 4)).sum()
        spy.reset_mock()
        engine.backward(loss)
    engine.step()
    engine.close()
    return spy.call_count, len(list(model.parameters()))


def test_a_backward_gives_the_transport_a_turn_at_each_gradient() -> None:
    for calls, num_params in run_ranks(4, progress_of_a_backward):
        assert calls >= num_params
