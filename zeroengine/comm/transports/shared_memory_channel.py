"""One order of operations between the ranks of one host. See ``shm``.

[Note: Progress]
There is no thread: a rank executes its outstanding operations, in order, whenever it waits, and tries
to whenever it issues another. A rank that waits for anything moves both channels on, so that two ranks
never wait for each other.
"""

from __future__ import annotations

import ctypes
import mmap
import select
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from zeroengine import ops
from zeroengine.comm.rank_order_sum import sum_in_rank_order
from zeroengine.errors import DivergenceError, ZeroEngineError
from zeroengine.utils.work import Work

if TYPE_CHECKING:
    from zeroengine.comm.transports.shared_memory import SharedMemoryTransport

CHANNELS = ("gather", "reduce")
RING = 256  # operations that a rank may post ahead of its peers
RECORD = struct.Struct("<QIQQ100s")  # sequence number, kind, bytes, offset, label
COUNTERS = 3 * 64  # posted, summed and executed, each on a cache line of its own
CHANNEL_BYTES = COUNTERS + RING * RECORD.size
CONTROL_BYTES = len(CHANNELS) * CHANNEL_BYTES
GATHER, REDUCE, SCALARS = range(3)
KINDS = ("gather", "reduce", "all-reduce")
POLL_US = 2000


def _shortened(label: str) -> bytes:
    """At most 100 bytes that still differ where long labels do."""
    whole = label.encode()
    return whole if len(whole) <= 100 else whole[:91] + b"~%08x" % zlib.crc32(whole)


@dataclass
class SharedMemoryPeer:
    """A rank's memory file as this process sees it."""

    rank: int
    fd: int
    pidfd: int  # readable once the process has ended; -1 where the kernel has none
    control: mmap.mmap

    def ended(self) -> bool:
        if self.pidfd < 0:
            return False
        poll = select.poll()  # select.select takes no descriptor above 1,023
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))


class Step(NamedTuple):
    """A read that may happen once the counter of each of ``ranks`` has reached the operation's number."""

    counters: Mapping[int, int]  # rank to address
    ranks: Sequence[int]
    read: Callable[[], None]


@dataclass
class SharedMemoryWork:
    """An operation that this rank has posted, and the steps that it still has to take."""

    channel: SharedMemoryChannel
    seq: int
    steps: deque[Step] = field(default_factory=deque)

    def wait_host(self) -> None:
        """Execute this operation and those before it, waiting for peers."""
        self.channel.execute(self, block=True)

    wait_stream = wait_host

    def done(self) -> bool:
        """Execute what peers are ready for, and return whether this operation was among it."""
        return self.channel.execute(self, block=False)


class SharedMemoryChannel:
    """One order of operations. See ``interfaces.Channel``."""

    def __init__(self, transport: SharedMemoryTransport, name: str) -> None:
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
        self._pending: deque[SharedMemoryWork] = deque()

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

    def _post_sum(self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool) -> SharedMemoryWork:
        t = self._transport
        n = shard.numel()
        work = self._post(REDUCE, label, full)
        mine = full[t.rank * n : (t.rank + 1) * n]
        add = self._sum_kernel if full.dtype in ops.DTYPE_CODES and shard.dtype in ops.DTYPE_CODES else self._sum_torch
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
        self._issue(work).wait_host()
        return out

    def reusable(self, work: Work, patience: float) -> bool:
        assert isinstance(work, SharedMemoryWork)
        t = self._transport
        deadline = time.monotonic() + patience
        for peer in (*t.others, t.peers[t.rank]):  # this rank too: its sum reads its own memory
            if not self._comes(self._executed[peer.rank], work.seq, peer.rank, deadline):
                return False
        return True

    # -- posting and executing --------------------------------------------------------------------

    def _post(self, kind: int, label: str, sent: torch.Tensor) -> SharedMemoryWork:
        t = self._transport
        if t.closed:
            raise ZeroEngineError("this engine is closed: it cannot gather or reduce any more")
        self._seq += 1
        for peer in t.others:
            self._await(self._executed[peer.rank], self._seq - RING, peer.rank, "room")
        while self._pending and self._pending[0].seq <= self._seq - RING:
            self._pending[0].wait_host()  # it compares records, and its own is about to be overwritten
        record = RECORD.pack(self._seq, kind, sent.nbytes, t.offset_of(sent), _shortened(label))
        start = self._base + COUNTERS + self._seq % RING * RECORD.size
        t.control[start : start + RECORD.size] = record
        self._lib.ze_post(self._posted[t.rank], self._seq & 0xFFFFFFFF)
        return SharedMemoryWork(self, self._seq)

    def _issue(self, work: SharedMemoryWork) -> SharedMemoryWork:
        self._pending.append(work)
        self.progress()
        return work

    def progress(self) -> None:
        if self._pending:
            self.execute(self._pending[-1], block=False)

    def fence(self) -> None:
        """Returns when every peer has executed all that this rank has posted."""
        for peer in self._transport.others:
            self._await(self._executed[peer.rank], self._seq, peer.rank, f"rank {peer.rank} to read")

    def drain(self) -> None:
        if self._pending:
            self._pending[-1].wait_host()

    def execute(self, last: SharedMemoryWork, block: bool) -> bool:
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
        if seq > 0 and not self._comes(address, seq, rank, time.monotonic() + t.timeout):
            raise DivergenceError(
                f"rank {t.rank} has waited {t.timeout:g} s (comm.timeout_seconds) for {waiting_for}. {t.report()}"
            )

    def _comes(self, address: int, seq: int, rank: int, deadline: float) -> bool:
        """Whether ``rank``'s counter reaches ``seq`` by ``deadline``. Moves both channels on meanwhile."""
        t = self._transport
        while not self._reached(address, seq):
            t.progress()
            if self._lib.ze_wait(address, seq & 0xFFFFFFFF, POLL_US):
                break
            if t.peers[rank].ended() and not self._reached(address, seq):
                raise DivergenceError(f"rank {rank} has ended. {t.report()}")
            if time.monotonic() > deadline:
                return False
        return True

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

    def _source(self, peer: SharedMemoryPeer, seq: int) -> int:
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

    def _read(self, peer: SharedMemoryPeer, seq: int, address: int, nbytes: int, start: int = 0) -> None:
        got = self._lib.ze_pread(peer.fd, address, nbytes, self._source(peer, seq) + start)
        if got != nbytes:
            raise OSError(-got, f"reading the memory of rank {peer.rank}")

    def _map(self, peer: SharedMemoryPeer, seq: int, address: int, nbytes: int) -> None:
        failed = self._lib.ze_map(address, nbytes, peer.fd, self._source(peer, seq), False)
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
            *(shard.data_ptr(), ops.DTYPE_CODES[shard.dtype], accumulate, shard.numel()),
            *(ops.DTYPE_CODES[mine.dtype], count, local, fds, offsets),
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
