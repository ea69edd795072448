"""Every transport moves the same bytes and adds in the same order, however its operations are awaited."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import re
import time
from ctypes import c_int, c_long, c_size_t, c_void_p
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.ranks import RankFailed, run_ranks
from tests.nccl_over_gloo import replace_reduce_scatter
from zeroengine import ops
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Slices, Transport
from zeroengine.comm.rank_order_sum import sum_in_rank_order
from zeroengine.comm.transports.choose import open_nccl, open_transport
from zeroengine.comm.transports.host_staged import HostStagedTransport
from zeroengine.comm.transports.nccl import NCCLTransport
from zeroengine.comm.transports.shared_memory_file import MAX_POSTED
from zeroengine.comm.transports.single_process import SingleProcessTransport
from zeroengine.utils.host_memory import address_of, huge_page_offset
from zeroengine.utils.work import Work

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# The hosts of "two-level" are imagined, with two ranks each.
KINDS = pytest.mark.parametrize("kind", ["shm", "gloo", "staged", "two-level", "nccl"])


def transport_of(kind: str, timeout: float = 60.0) -> Transport:
    dist.init_process_group("gloo")
    if kind == "nccl":
        replace_reduce_scatter(pytest.MonkeyPatch())  # for the rest of this process
        return open_nccl(Group(None, CPU), timeout)
    if kind == "two-level":
        imagine_hosts(2)
        return open_transport(Group(None, CPU), "auto", timeout)
    if kind == "staged":  # as for a GPU, on a second place in the CPU's memory
        return HostStagedTransport(open_transport(Group(None, CPU), "gloo", timeout), CPU)
    return open_transport(Group(None, CPU), kind, timeout)


def values(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What ``rank`` sends in operation ``seed``: any rank can tell."""
    generator = torch.Generator().manual_seed(97 * seed + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def summed(pieces: list[torch.Tensor], per_host: int = 100) -> torch.Tensor:
    """The ranks of each host in rank order, then the hosts; low precision in fp32, rounded once."""
    return wide_sum(pieces, per_host).to(pieces[0].dtype)


def wide_sum(pieces: list[torch.Tensor], per_host: int) -> torch.Tensor:
    wide = torch.float64 if pieces[0].dtype is torch.float64 else torch.float32
    hosts = [pieces[first : first + per_host] for first in range(0, len(pieces), per_host)]
    totals = []
    for host in hosts:
        total = host[0].to(wide)
        for piece in host[1:]:
            total = total + piece.to(wide)
        totals.append(total)
    total = totals[0]
    for other in totals[1:]:
        total = total + other
    return total


def agree(transport: Transport, found: torch.Tensor, expected: torch.Tensor, sent: torch.dtype) -> bool:
    """Whether a sum has the bits of rank order; on NCCL, which has its own order and rounds as `sent`, nearly so."""
    if not isinstance(transport, NCCLTransport):
        return torch.equal(found, expected)
    precision = torch.finfo(sent).eps
    return found.dtype is expected.dtype and torch.allclose(found, expected, rtol=8 * precision, atol=8 * precision)


def ranks_per_host(transport: Transport) -> int:
    return 2 if transport.name == "two-level" else transport.world_size


class Script:
    """Operations in an order that all ranks share, awaited in an order of the rank's own."""

    def __init__(self, transport: Transport, seed: int) -> None:
        self.transport, self.seed = transport, seed
        self.per_host = ranks_per_host(transport)
        self.rank, self.size = transport.rank, transport.world_size
        self.shared = random.Random(seed)
        self.own = random.Random(1000 * seed + self.rank)
        # Each with its result, the expected one, and the dtype that travels.
        self.open: list[tuple[Work, torch.Tensor, torch.Tensor | None, torch.dtype]] = []
        self.accumulators: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
        self.number = 0

    def run(self, operations: int) -> None:
        for _ in range(operations):
            self.number += 1
            operation = self.shared.choice(
                [
                    *(self.gather, self.scatter, self.accumulate, self.all_reduce, self.scalars),
                    *(self.exchange, self.exchange_unequal),
                ]
            )
            operation(self.shared.choice([1, 7, 64, 1000, 33_333]), self.shared.choice(DTYPES))
            while len(self.open) > self.own.randrange(8):
                self.finish(self.own.randrange(len(self.open)))
        while self.open:
            self.finish(self.own.randrange(len(self.open)))

    def finish(self, index: int) -> None:
        work, result, expected, sent = self.open.pop(index)
        work.wait_stream()
        assert work.done()
        if expected is not None:
            assert agree(self.transport, result, expected, sent)

    def sent(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        everyone = [values(self.number, rank, numel, dtype) for rank in range(self.size)]
        return self.transport.empty(numel, dtype).copy_(everyone[self.rank]), everyone

    def mine(self, everyone: list[torch.Tensor]) -> torch.Tensor:
        return summed([piece.chunk(self.size)[self.rank] for piece in everyone], self.per_host)

    def gather(self, numel: int, dtype: torch.dtype) -> None:
        shard, everyone = self.sent(numel, dtype)
        full = self.transport.empty(numel * self.size, dtype)
        if self.shared.random() < 0.5:  # the shard is this rank's part of the result
            full.chunk(self.size)[self.rank].copy_(shard)
            shard = full.chunk(self.size)[self.rank]
        work = self.transport.gather.all_gather(full, shard, f"unit {self.number}")
        self.open.append((work, full, torch.cat(everyone), dtype))

    def scatter(self, numel: int, dtype: torch.dtype) -> None:
        full, everyone = self.sent(numel * self.size, dtype)
        in_place = self.shared.random() < 0.5
        shard = full.chunk(self.size)[self.rank] if in_place else torch.empty(numel, dtype=dtype)
        work = self.transport.reduce.reduce_scatter(shard, full, f"unit {self.number}")
        self.open.append((work, shard, self.mine(everyone), dtype))

    def accumulate(self, numel: int, dtype: torch.dtype) -> None:
        """Two operations into one shard under way at a time; the second adds. Its dtype may be a wider one."""
        kept = torch.promote_types(dtype, self.shared.choice([dtype, torch.float32]))
        shard, parts = torch.full((numel,), 7.0, dtype=kept), []
        for second in (False, True):
            self.number += 1
            full, everyone = self.sent(numel * self.size, dtype)
            parts.append([piece.chunk(self.size)[self.rank] for piece in everyone])
            work = self.transport.reduce.reduce_scatter(shard, full, f"unit {self.number}", accumulate=second)
            expected = None
            if second:
                first = wide_sum(parts[0], self.per_host).to(kept)
                expected = (first + wide_sum(parts[1], self.per_host)).to(kept)
            self.open.append((work, shard, expected, dtype))

    def exchange(self, numel: int, dtype: torch.dtype) -> None:
        """Slices for each rank, or for several ranks that have the same one."""
        levels = self.shared.choice([None, (self.size,), ()])
        if self.transport.reduces_by_levels:
            levels = None
        num_slices = 1 if levels == () else self.size
        sent, everyone = self.sent(numel * num_slices, dtype)
        received = torch.empty(numel * self.size, dtype=dtype)
        work = self.transport.reduce.all_to_all(received, sent, f"unit {self.number}", slices=Slices(levels=levels))
        index = 0 if num_slices == 1 else self.rank
        expected = torch.cat([piece.chunk(num_slices)[index] for piece in everyone])
        self.open.append((work, received, expected, dtype))

    def exchange_unequal(self, numel: int, dtype: torch.dtype) -> None:
        """Slices of unequal size, some of them empty."""
        sizes = tuple(tuple(self.shared.randrange(numel) for _ in range(self.size)) for _ in range(self.size))
        everyone = [values(self.number, rank, sum(sizes[rank]), dtype) for rank in range(self.size)]
        memory = self.transport.empty(max(sum(sizes[self.rank]), 1), dtype)
        sent = memory[: sum(sizes[self.rank])].copy_(everyone[self.rank])
        pieces = [piece.split(row)[self.rank] for piece, row in zip(everyone, sizes, strict=True)]
        received = torch.empty(sum(row[self.rank] for row in sizes), dtype=dtype)
        channel = self.shared.choice([self.transport.gather, self.transport.reduce])
        work = channel.all_to_all(received, sent, f"unit {self.number}", Slices(sizes=sizes))
        self.open.append((work, received, torch.cat(pieces), dtype))

    def all_reduce(self, numel: int, dtype: torch.dtype) -> None:
        full, everyone = self.sent(numel * self.size, dtype)
        work = self.transport.reduce.all_reduce(full, f"unit {self.number}")
        # All-reduces are awaited in one order on all ranks, but a rank may have issued more by then than its peers.
        late = self.own.random() < 0.5
        if not late:
            work.wait_stream()
        self.number += 1
        self.scatter(numel, dtype)
        if late:
            work.wait_stream()
        assert agree(self.transport, full, summed(everyone, self.per_host), dtype)

    def scalars(self, numel: int, dtype: torch.dtype) -> None:
        numel = min(numel, 100)
        everyone = [values(self.number, rank, numel, torch.float64) for rank in range(self.size)]
        found = self.transport.all_reduce_scalars(everyone[self.rank].clone(), "norm")
        assert agree(self.transport, found, summed(everyone), torch.float64)


def run_scripts(kind: str) -> None:
    transport = transport_of(kind)
    assert transport.name == {"staged": "gloo"}.get(kind, kind)
    for seed in range(4):
        Script(transport, seed).run(25)
    transport.close()


@KINDS
def test_operations_of_any_kind_size_and_dtype_may_be_awaited_in_any_order(kind: str) -> None:
    run_ranks(4 if kind == "two-level" else 3, run_scripts, kind)


def reuse_memory(kind: str) -> int:
    """One buffer sent over and over, as soon as it may be written again."""
    transport = transport_of(kind)
    numel, size = 30_000, transport.world_size
    full = transport.empty(numel * size, torch.float32)
    shards = [torch.empty(numel) for _ in range(40)]
    works, waits = [], 0
    for step, shard in enumerate(shards):
        full.copy_(values(step, transport.rank, numel * size, torch.float32))
        works.append(transport.reduce.reduce_scatter(shard, full, f"unit {step}"))
        while not transport.reduce.reusable(works[-1], 0.01):
            waits += 1
    for work in works:
        work.wait_stream()
    for step, shard in enumerate(shards):
        pieces = [values(step, rank, numel * size, torch.float32).chunk(size)[transport.rank] for rank in range(size)]
        assert torch.equal(shard, summed(pieces, ranks_per_host(transport))), step
    return waits


@KINDS
def test_memory_that_is_reusable_may_be_written_while_peers_are_behind(kind: str) -> None:
    run_ranks(4 if kind == "two-level" else 3, reuse_memory, kind)


def gather_again(kind: str) -> None:
    """A full buffer that is released, gathered after an update, and written to."""
    transport = transport_of(kind)
    for dtype in (torch.float32, torch.bfloat16):
        numel = max(transport.shard_align_bytes // dtype.itemsize, 1) * 3
        buffer = transport.buffer(numel * transport.world_size, dtype)
        views = buffer.tensor.split(numel)
        shard = transport.empty(numel, dtype)
        assert buffer.nbytes() == buffer.tensor.nbytes
        buffer.free()
        for step in range(3):
            assert buffer.nbytes() == 0
            shard.copy_(values(step, transport.rank, numel, dtype))
            buffer.allocate()
            transport.gather.all_gather(buffer.tensor, shard, "unit").wait_stream()
            assert buffer.nbytes() == buffer.tensor.nbytes
            for rank, view in enumerate(views):
                assert torch.equal(view, values(step, rank, numel, dtype))
            buffer.tensor.fill_(transport.rank)  # stays with this rank
            transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64), "norm")
            assert torch.equal(shard, values(step, transport.rank, numel, dtype))
            assert torch.equal(buffer.tensor, torch.full_like(buffer.tensor, transport.rank))
            buffer.free()


@KINDS
def test_a_released_buffer_shows_new_values_at_the_next_gather_and_its_writes_stay_local(kind: str) -> None:
    run_ranks(4 if kind == "two-level" else 2, gather_again, kind)


HUGE = 2 << 20


def huge_pages_bytes(tensor: torch.Tensor) -> int:
    """The bytes of shared memory that this process sees through huge pages at the addresses of ``tensor``."""
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            inside = start <= int(line.split("-")[0], 16) < stop
        elif inside and line.startswith("ShmemPmdMapped:"):
            total += int(line.split()[1]) * 1024
    return total


def system_makes_huge_pages() -> bool:
    """Whether the kernel makes a huge page of shared memory when a process asks for it."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = c_void_p, [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
    libc.madvise.argtypes = [c_void_p, c_size_t, c_int]
    fd = os.memfd_create("probe")
    os.ftruncate(fd, HUGE)
    reserved = mmap.mmap(-1, 2 * HUGE)
    address = huge_page_offset(reserved) + address_of(reserved)
    map_fixed = 0x10
    assert libc.mmap(address, HUGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | map_fixed, fd, 0) == address
    os.close(fd)
    ctypes.memset(address, 1, HUGE)
    madv_collapse = 25  # of Linux 6.1
    return libc.madvise(address, HUGE, madv_collapse) == 0


def map_huge_pages() -> None:
    transport = transport_of("shm")
    nbytes = 5 * HUGE // 2 + mmap.PAGESIZE  # a shard begins and ends in the middle of a huge page
    buffer = transport.buffer(nbytes * transport.world_size, torch.uint8)
    # Something small may lie before it in the file.
    transport.empty(100, torch.uint8)
    shard = transport.empty(nbytes, torch.uint8).fill_(transport.rank)
    buffer.allocate()
    transport.gather.all_gather(buffer.tensor, shard, "unit").wait_stream()
    for rank, view in enumerate(buffer.tensor.split(nbytes)):
        assert view.eq(rank).all()
        first, last = -(-rank * nbytes // HUGE), (rank + 1) * nbytes // HUGE
        assert huge_pages_bytes(view) == (last - first) * HUGE, rank
    # A write takes small pages of its own.
    buffer.tensor.fill_(7)
    transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64), "norm")
    assert shard.eq(transport.rank).all()


@pytest.mark.skipif(not system_makes_huge_pages(), reason="this kernel makes no huge pages of shared memory")
def test_shards_of_all_ranks_are_mapped_in_huge_pages() -> None:
    run_ranks(3, map_huge_pages)


def many_operations() -> None:
    """More than a ring of records holds, with names that are long."""
    transport = transport_of("shm")
    shards = [transport.empty(8, torch.float32).fill_(step) for step in range(600)]
    fulls = [torch.empty(8 * transport.world_size) for _ in shards]
    works = [
        transport.gather.all_gather(f, s, f"{'x' * 150} {i}")
        for i, (f, s) in enumerate(zip(fulls, shards, strict=True))
    ]
    for step, (work, full) in enumerate(zip(works, fulls, strict=True)):
        work.wait_stream()
        assert full.eq(step).all()
    transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64), "norm")


def test_more_operations_may_be_under_way_than_max_posted() -> None:
    run_ranks(2, many_operations)


def run_ahead(folder: Path) -> None:
    """Rank 1 issues one operation and does nothing for a while. Rank 0 issues as many as it may, and one more."""
    transport = transport_of("shm")
    count = MAX_POSTED + 1
    shards = [transport.empty(8, torch.float32).fill_(step) for step in range(count)]
    fulls = [torch.empty(8 * transport.world_size) for _ in shards]

    def gather(step: int) -> Work:
        return transport.gather.all_gather(fulls[step], shards[step], f"unit {step}")

    works = []
    if transport.rank == 1:
        works.append(gather(0))
        (folder / "rank 1 has issued one").touch()
        wait_for_file(folder / "rank 0 has issued MAX_POSTED")
        time.sleep(0.2)  # rank 0 may not go on, for this rank has still to read the record of the first one
    else:
        wait_for_file(folder / "rank 1 has issued one")
    for step in range(len(works), count):
        if transport.rank == 0 and step == MAX_POSTED:
            (folder / "rank 0 has issued MAX_POSTED").touch()
        works.append(gather(step))
    for step, (work, full) in enumerate(zip(works, fulls, strict=True)):
        work.wait_stream()
        assert full.eq(step).all()
    transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64), "norm")


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.001)


def test_a_rank_that_is_max_posted_operations_ahead_waits_for_its_peers(tmp_path: Path) -> None:
    run_ranks(2, run_ahead, tmp_path)


def ask_for_shm() -> None:
    from unittest import mock

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with (
        mock.patch("zeroengine.comm.transports.shared_memory_file.offer", lambda: None)
        if rank == 1
        else mock.patch("os.getppid")
    ):
        group = Group(None, CPU)
        assert open_transport(group, "auto", 30.0).name == "gloo"
        open_transport(group, "shm", 30.0)


def test_all_ranks_use_gloo_where_one_cannot_share_memory_and_asking_for_it_is_an_error() -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, ask_for_shm)
    for kind, message, _ in failed.value.failures.values():
        assert kind == "ZeroEngineError"
        assert 'comm.transport "shm" cannot be used: ' in message and 'Write "auto" or "gloo".' in message


def test_a_single_rank_moves_nothing() -> None:
    transport = SingleProcessTransport(CPU)
    shard = torch.arange(5.0)
    full = transport.empty(5, torch.float32)
    transport.gather.all_gather(full, shard, "unit").wait_stream()
    assert torch.equal(full, shard)
    transport.reduce.reduce_scatter(full, shard, "unit", accumulate=True).wait_stream()
    assert torch.equal(full, 2 * shard)
    transport.reduce.all_reduce(full, "unit").wait_stream()
    assert torch.equal(full, 2 * shard)
    assert transport.all_reduce_scalars(shard.double(), "norm").tolist() == shard.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("numel", [0, 1, 17, 40_000])
@pytest.mark.parametrize("compiled", [True, False])
def test_sums_run_in_rank_order_and_round_once(
    dtype: torch.dtype, accumulate: bool, numel: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(ops, "library", lambda: None)
    pieces = [values(3, rank, numel, dtype) for rank in range(5)]
    before = values(4, 0, numel, dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    total = pieces[0].to(wide)
    for piece in pieces[1:]:
        total = total + piece.to(wide)
    expected = ((total + before.to(wide)) if accumulate else total).to(dtype)
    for into_a_piece in (False, True):
        copies = [piece.clone() for piece in pieces]
        target = copies[2] if into_a_piece and not accumulate else before.clone()
        sum_in_rank_order(target, copies, accumulate)
        assert torch.equal(target, expected)
