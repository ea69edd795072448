"""The transport between CPU ranks of one host: each rank's memory is a file that its peers read.

Gloo would send the bytes through sockets, four kernel copies a byte on cores that are busy with compute.
Here a rank *posts* an operation (a counter in a shared page, and what the operation is) and each peer
reads what it needs straight into its destination.

[Note: Progress]
There is no thread: a rank executes its outstanding operations, in order, whenever it waits, and tries
to whenever it issues another. A rank that waits for anything moves both channels on, so that two ranks
never wait for each other.

[Note: Lifetimes]
Memory that was posted may be written again once every peer has executed the operation (``executed`` of
each peer is past it). ``all_reduce_scalars`` is posted on the reduce channel after the gather channel is
drained, and a rank posts it only after executing everything before it, so it closes all lifetimes at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from .. import ops
from ..errors import DivergenceError
from .base import Buffer, Work
from .sums import CODES, sum_in_rank_order, sum_kernel

CHANNELS = ("gather", "reduce")
RING = 256  # operations that a rank may post ahead of its peers
RECORD = struct.Struct("<QIQQ100s")  # sequence number, kind, bytes, offset, label
COUNTERS = 3 * 64  # posted, summed and executed, each on a cache line of its own
CHANNEL_BYTES = COUNTERS + RING * RECORD.size
CONTROL_BYTES = len(CHANNELS) * CHANNEL_BYTES
GATHER, REDUCE, SCALARS = range(3)
KINDS = ("gather", "reduce", "all-reduce")
POLL_US = 2000


@dataclass
class ShmPeer:
    """A rank's memory file as this process sees it."""

    rank: int
    fd: int
    pidfd: int  # readable once the process has ended; -1 where the kernel has none
    control: mmap.mmap

    def ended(self) -> bool:
        return self.pidfd >= 0 and bool(select.select([self.pidfd], [], [], 0)[0])


class Step(NamedTuple):
    """A read that may happen once the counter of each of ``ranks`` has reached the operation's number."""

    counters: Mapping[int, int]  # rank to address
    ranks: Sequence[int]
    read: Callable[[], None]


@dataclass
class ShmWork:
    """An operation that this rank has posted, and the steps that it still has to take."""

    channel: ShmChannel
    seq: int
    steps: deque[Step] = field(default_factory=deque)

    def wait(self) -> None:
        self.channel.execute(self, block=True)

    def is_completed(self) -> bool:
        return self.channel.execute(self, block=False)


class ShmChannel:
    """One order of operations. See ``base.Channel``."""

    def __init__(self, transport: ShmTransport, name: str) -> None:
        self._transport = transport
        self._name = name
        self._base = CHANNELS.index(name) * CHANNEL_BYTES
        self._posted: dict[int, int] = {}  # addresses of each rank's counters
        self._summed: dict[int, int] = {}
        self._executed: dict[int, int] = {}
        for peer in transport.peers:
            address = ctypes.addressof(ctypes.c_char.from_buffer(peer.control, self._base))
            self._posted[peer.rank] = address
            self._summed[peer.rank] = address + 64
            self._executed[peer.rank] = address + 128
        self._lib = transport.lib
        self._seq = 0
        self._pending: deque[ShmWork] = deque()

    # -- operations -------------------------------------------------------------------------------

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Work:
        t = self._transport
        nbytes, base = shard.nbytes, full.data_ptr()
        work = self._post(GATHER, label, shard)
        mapped = t.is_mapped(full) and nbytes % mmap.PAGESIZE == 0
        bring = self._map if mapped else self._read
        if mapped:
            work.steps.append(Step({}, (), partial(bring, t.peers[t.rank], work.seq, base + t.rank * nbytes, nbytes)))
        elif base + t.rank * nbytes != shard.data_ptr():
            full.chunk(t.world_size)[t.rank].copy_(shard)
        for peer in t.others:
            step = partial(bring, peer, work.seq, base + peer.rank * nbytes, nbytes)
            work.steps.append(Step(self._posted, (peer.rank,), step))
        return self._issue(work)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool = False) -> Work:
        return self._issue(self._post_sum(shard, full, label, accumulate))

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        t = self._transport
        n = full.numel() // t.world_size
        work = self._post_sum(full[t.rank * n : (t.rank + 1) * n], full, label, False)
        mine = self._summed[t.rank]
        work.steps.append(Step({}, (), lambda: self._lib.ze_post(mine, work.seq & 0xFFFFFFFF)))
        for peer in t.others:
            start = peer.rank * n * full.element_size()
            read = partial(self._read, peer, work.seq, full.data_ptr() + start, n * full.element_size(), start)
            work.steps.append(Step(self._summed, (peer.rank,), read))
        return self._issue(work)

    def _post_sum(self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool) -> ShmWork:
        t = self._transport
        n = shard.numel()
        work = self._post(REDUCE, label, full)
        mine = full[t.rank * n : (t.rank + 1) * n]
        add = self._sum_kernel if full.dtype in CODES and shard.dtype in CODES else self._sum_torch
        work.steps.append(Step(self._posted, range(t.world_size), partial(add, shard, mine, work.seq, accumulate)))
        return work

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        t = self._transport
        out = torch.empty_like(values)
        work = self._post(SCALARS, label, values)

        def add() -> None:
            pieces = [values if peer.rank == t.rank else torch.empty_like(values) for peer in t.peers]
            for peer in t.others:
                self._read(peer, work.seq, pieces[peer.rank].data_ptr(), values.nbytes)
            sum_in_rank_order(out, pieces, accumulate=False)

        work.steps.append(Step(self._posted, range(t.world_size), add))
        self._issue(work).wait()
        return out

    def reusable(self, work: Work, wait: bool) -> bool:
        assert isinstance(work, ShmWork)
        if wait:
            work.wait()
        for peer in self._transport.peers:  # this rank too: its sum reads its own memory
            if wait:
                self._await(self._executed[peer.rank], work.seq, peer.rank, f"rank {peer.rank} to read")
            elif not self._reached(self._executed[peer.rank], work.seq):
                return False
        return True

    # -- posting and executing --------------------------------------------------------------------

    def _post(self, kind: int, label: str, sent: torch.Tensor) -> ShmWork:
        t = self._transport
        self.progress()  # own records before the ring wraps
        self._seq += 1
        for peer in t.others:
            self._await(self._executed[peer.rank], self._seq - RING, peer.rank, "room")
        record = RECORD.pack(self._seq, kind, sent.nbytes, t.offset_of(sent), label.encode()[:100])
        start = self._base + COUNTERS + self._seq % RING * RECORD.size
        t.control[start : start + RECORD.size] = record
        self._lib.ze_post(self._posted[t.rank], self._seq & 0xFFFFFFFF)
        return ShmWork(self, self._seq)

    def _issue(self, work: ShmWork) -> ShmWork:
        self._pending.append(work)
        self.progress()
        return work

    def progress(self) -> None:
        if self._pending:
            self.execute(self._pending[-1], block=False)

    def drain(self) -> None:
        if self._pending:
            self._pending[-1].wait()

    def execute(self, last: ShmWork, block: bool) -> bool:
        """Executes pending operations up to ``last``; stops at the first that peers are not ready for."""
        while self._pending and self._pending[0].seq <= last.seq:
            work = self._pending[0]
            while work.steps:
                step = work.steps[0]
                for rank in step.ranks:
                    if not self._reached(step.counters[rank], work.seq):
                        if not block:
                            return False
                        self._await(step.counters[rank], work.seq, rank, self.describe(self._transport.rank, work.seq))
                if work.steps and work.steps[0] is step:  # else waiting has moved this channel on
                    step.read()
                    work.steps.popleft()
            if self._pending and self._pending[0] is work:
                self._pending.popleft()
                self._lib.ze_post(self._executed[self._transport.rank], work.seq & 0xFFFFFFFF)
        return True

    def _reached(self, address: int, seq: int) -> bool:
        return (self._lib.ze_load(address) - seq) & 0xFFFFFFFF < 1 << 31

    def _await(self, address: int, seq: int, rank: int, waiting_for: str) -> None:
        t = self._transport
        if seq <= 0 or self._reached(address, seq):
            return
        deadline = time.monotonic() + t.timeout
        while not self._lib.ze_wait(address, seq & 0xFFFFFFFF, POLL_US):
            t.progress()
            if t.peers[rank].ended() and not self._reached(address, seq):
                raise DivergenceError(f"rank {rank} has ended. {t.report()}")
            if time.monotonic() > deadline:
                raise DivergenceError(
                    f"no progress for {t.timeout:g} s (comm.timeout_seconds): rank {t.rank} waits for {waiting_for}. "
                    f"{t.report()}"
                )

    # -- reads ------------------------------------------------------------------------------------

    def _record(self, rank: int, seq: int) -> tuple[int, int, int, int, str]:
        start = self._base + COUNTERS + seq % RING * RECORD.size
        number, kind, nbytes, offset, label = RECORD.unpack_from(self._transport.peers[rank].control, start)
        return number, kind, nbytes, offset, label.rstrip(b"\0").decode(errors="replace")

    def describe(self, rank: int, seq: int | None = None) -> str:
        """What ``rank`` last posted, such as ``reduce blocks.7``."""
        last = self._lib.ze_load(self._posted[rank]) if seq is None else seq
        if last == 0:
            return "nothing yet"
        _, kind, _, _, label = self._record(rank, last)
        return f"{KINDS[kind]} {label} (number {last})"

    def _source(self, peer: ShmPeer, seq: int) -> int:
        """The offset that ``peer`` posted, after comparing its operation with this rank's."""
        number, kind, nbytes, offset, label = self._record(peer.rank, seq)
        mine = self._record(self._transport.rank, seq)
        if (number, kind, nbytes, label) != (mine[0], mine[1], mine[2], mine[4]):
            raise DivergenceError(
                f"the ranks run different units: rank {self._transport.rank} is at {KINDS[mine[1]]} {mine[4]} "
                f"({mine[2]} bytes), rank {peer.rank} at {KINDS[kind]} {label} ({nbytes} bytes). Every rank must run "
                "the same modules in the same order; a module that only some ranks need belongs under "
                "`with zeroengine.gathered(module):`."
            )
        return offset

    def _read(self, peer: ShmPeer, seq: int, address: int, nbytes: int, start: int = 0) -> None:
        got = self._lib.ze_pread(peer.fd, address, nbytes, self._source(peer, seq) + start)
        if got != nbytes:
            raise OSError(-got, f"reading the memory of rank {peer.rank}")

    def _map(self, peer: ShmPeer, seq: int, address: int, nbytes: int) -> None:
        failed = self._lib.ze_map(address, nbytes, peer.fd, self._source(peer, seq))
        if failed:
            raise OSError(-failed, f"mapping the memory of rank {peer.rank}")

    def _sum_kernel(self, shard: torch.Tensor, mine: torch.Tensor, seq: int, accumulate: bool) -> None:
        t, count = self._transport, self._transport.world_size
        local, fds, offsets = (ctypes.c_void_p * count)(), (ctypes.c_int * count)(), (ctypes.c_int64 * count)()
        for r, peer in enumerate(t.peers):
            if r == t.rank:
                local[r] = mine.data_ptr()
            else:
                fds[r], offsets[r] = peer.fd, self._source(peer, seq) + t.rank * mine.nbytes
        got = self._lib.ze_sum(
            shard.data_ptr(), CODES[shard.dtype], accumulate, shard.numel(), CODES[mine.dtype], count, local, fds, offsets
        )
        if got < 0:
            raise OSError(-got, "reading the memory of a peer rank")

    def _sum_torch(self, shard: torch.Tensor, mine: torch.Tensor, seq: int, accumulate: bool) -> None:
        """For dtypes that the kernel lacks."""
        t = self._transport
        pieces = [mine if peer.rank == t.rank else torch.empty_like(mine) for peer in t.peers]
        for peer in t.others:
            piece = pieces[peer.rank]
            got = self._lib.ze_pread(
                peer.fd, piece.data_ptr(), piece.nbytes, self._source(peer, seq) + t.rank * mine.nbytes
            )
            if got < 0:
                raise OSError(-got, f"reading the memory of rank {peer.rank}")
        sum_in_rank_order(shard, pieces, accumulate)


class MappedBuffer:
    """A ``Buffer`` that shows the ranks' shards side by side: a gather maps their pages, and copies nothing.

    Writes stay private to this process, as they would in a copy.
    """

    def __init__(self, lib: ctypes.CDLL, numel: int, dtype: torch.dtype) -> None:
        self._lib = lib
        self._size = max(numel, 1) * dtype.itemsize
        self._memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype, count=numel)
        self._holds = True

    def prepare(self) -> None:
        self._holds = True

    def free(self) -> None:
        failed = self._lib.ze_unmap(self.tensor.data_ptr(), self._size)
        if failed:
            raise OSError(-failed, "releasing a full buffer")
        self._holds = False

    def nbytes(self) -> int:
        return self._size if self._holds else 0


class ShmTransport:
    """See ``base.Transport``. Made by ``connect``."""

    name = "shm"
    overlaps = False

    def __init__(self, rank: int, fd: int, peers: list[ShmPeer], timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, len(peers), timeout
        self.lib = declare(sum_kernel())
        self.peers, self.others = peers, [p for p in peers if p.rank != rank]
        self.control = peers[rank].control
        self._fd = fd
        self._end = CONTROL_BYTES
        self._regions: list[tuple[int, int, int]] = []  # address, bytes, offset in the file
        self.gather, self.reduce = (ShmChannel(self, name) for name in CHANNELS)
        self._mapped: set[int] = set()  # addresses of mapped buffers
        self._scalars: list[torch.Tensor] = []
        descriptors = {fd, *(p.fd for p in self.others), *(p.pidfd for p in peers if p.pidfd >= 0)}
        self._finalizer = weakref.finalize(self, _close_all, descriptors)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = max(numel, 1) * dtype.itemsize
        offset = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._end = offset + nbytes
        os.ftruncate(self._fd, self._end)
        memory = mmap.mmap(self._fd, nbytes, offset=offset)
        tensor = torch.frombuffer(memory, dtype=dtype, count=numel)
        self._regions.append((tensor.data_ptr(), nbytes, offset))
        return tensor

    def buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        buffer = MappedBuffer(self.lib, numel, dtype)
        self._mapped.add(buffer.tensor.data_ptr())
        return buffer

    def shard_align(self, dtype: torch.dtype) -> int:
        return mmap.PAGESIZE // dtype.itemsize

    def is_mapped(self, full: torch.Tensor) -> bool:
        return full.data_ptr() in self._mapped

    def offset_of(self, tensor: torch.Tensor) -> int:
        address = tensor.data_ptr()
        for start, nbytes, offset in self._regions:
            if start <= address < start + nbytes:
                return offset + address - start
        raise AssertionError("memory that is sent comes from Transport.empty")

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        # Two vectors in turn: a rank is at most one such operation ahead of the slowest reader.
        if not self._scalars or self._scalars[0].numel() < values.numel():
            self._scalars = [self.empty(values.numel(), torch.float64) for _ in range(2)]
        self._scalars.reverse()
        sent = self._scalars[0][: values.numel()].copy_(values)
        self.gather.drain()
        self.reduce.drain()
        return self.reduce.all_reduce_scalars(sent, label)

    def progress(self) -> None:
        self.gather.progress()
        self.reduce.progress()

    def report(self) -> str:
        lines = []
        for peer in self.peers:
            at = ", ".join(f"{name}: {getattr(self, name).describe(peer.rank)}" for name in CHANNELS)
            lines.append(f"rank {peer.rank}{' (ended)' if peer.ended() else ''} last issued {at}")
        return "; ".join(lines) + "."

    def close(self) -> None:
        self._finalizer()


def _close_all(descriptors: set[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Types of the C functions of ``csrc/cpu/exchange.cpp``."""
    p, i32, i64, u32 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint32
    lib.ze_post.argtypes, lib.ze_post.restype = [p, u32], None
    lib.ze_load.argtypes, lib.ze_load.restype = [p], u32
    lib.ze_wait.argtypes, lib.ze_wait.restype = [p, u32, i32], i32
    lib.ze_pread.argtypes, lib.ze_pread.restype = [i32, p, i64, i64], i64
    lib.ze_map.argtypes, lib.ze_map.restype = [p, i64, i32, i64], i32
    lib.ze_unmap.argtypes, lib.ze_unmap.restype = [p, i64], i32
    return lib


@dataclass(frozen=True)
class Address:
    """Where peers find a rank's memory."""

    host: str  # differs between hosts and between containers
    pid: int
    fd: int
    inode: int


def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f"{f.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


def offer() -> Address | None:
    """Makes this rank's memory file; None where the system or the build has no such thing."""
    if ops.library() is None or not hasattr(os, "memfd_create"):
        return None
    try:
        fd = os.memfd_create("zeroengine", os.MFD_CLOEXEC)
        os.ftruncate(fd, CONTROL_BYTES)
        return Address(_host(), os.getpid(), fd, os.fstat(fd).st_ino)
    except OSError:
        return None


def connect(rank: int, addresses: Sequence[Address | None], timeout: float) -> ShmTransport | str:
    """Opens every peer's memory; a reason why not, where one cannot be reached."""
    mine = addresses[rank]
    if mine is None:
        return "shared memory is not available in this build or system"
    peers: list[ShmPeer] = []
    try:
        for r, address in enumerate(addresses):
            if address is None or address.host != mine.host:
                return f"rank {r} runs on another host or without shared memory"
            fd = mine.fd if r == rank else os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
            if os.fstat(fd).st_ino != address.inode:
                return f"rank {r}'s memory is not visible from rank {rank}"
            pidfd = os.pidfd_open(address.pid) if r != rank and hasattr(os, "pidfd_open") else -1
            peers.append(ShmPeer(r, fd, pidfd, mmap.mmap(fd, CONTROL_BYTES)))
    except OSError as error:
        return f"rank {r}'s memory cannot be opened from rank {rank}: {error}"
    return ShmTransport(rank, mine.fd, peers, timeout)
