"""One order of operations between the ranks of one host. See ``shared_memory``.

[Note: Progress]
There is no thread. A rank executes its outstanding operations, in order, whenever it waits. Whenever it issues an
operation, it executes those that peers are ready for. A waiting rank executes operations of both channels, so that two
ranks never wait for each other.

[Note: Counters]
Each rank has three counters per channel, in its control pages, which peers read: the numbers of the last operation that
it has posted, of the last whose sum it has computed, and of the last that it has executed. They count modulo 2^32.
Before a counter is raised (``ze_post``, with release order) everything that it announces has been written. After
reading it (``ze_load``, with acquire order) a peer may read that memory.
"""

from __future__ import annotations

import ctypes
import mmap
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from zeroengine import ops
from zeroengine.comm.alarm_board import DIFFERENT_UNITS_ADVICE
from zeroengine.comm.rank_order_sum import sum_in_rank_order
from zeroengine.comm.transports.shared_memory_file import (
    CACHE_LINE,
    CHANNEL_BYTES,
    CHANNELS,
    COUNTERS_BYTES,
    MAX_POSTED,
    RECORD,
    SharedMemory,
    SharedMemoryPeer,
    check_result,
)
from zeroengine.errors import DivergenceError, ZeroEngineError
from zeroengine.partition.degrees import shard_index
from zeroengine.utils.work import Work

GATHER, REDUCE, SCALARS = range(3)
KINDS = ("gather", "reduce", "all-reduce")
POLL_US = 2000


def _short_label(label: str) -> bytes:
    """Return at most 100 bytes, which differ for different labels."""
    encoded = label.encode()
    return encoded if len(encoded) <= 100 else encoded[:91] + b"~%08x" % zlib.crc32(encoded)


class PeerRead(NamedTuple):
    """A read that may happen once the counter of each of ``ranks`` has reached the operation's number."""

    counters: Sequence[int]  # the address of each rank's
    ranks: Sequence[int]
    read: Callable[[], None]


@dataclass
class SharedMemoryWork:
    """An operation that this rank has posted, and the steps that it still has to take."""

    channel: SharedMemoryChannel
    seq: int
    steps: deque[PeerRead] = field(default_factory=deque)

    def wait_host(self) -> None:
        """Execute this operation and those before it, waiting for peers."""
        self.channel.execute(self, block=True)

    wait_stream = wait_host

    def done(self) -> bool:
        """Execute operations that peers are ready for, and return whether this one has been executed."""
        return self.channel.execute(self, block=False)


class SharedMemoryChannel:
    """One order of operations. See ``interfaces.Channel``.

    Args:
        memory: The memory files of all ranks.
        name: One of ``CHANNELS``.
        timeout: Seconds after which a stalled operation is an error.
        channels: All channels of this rank, once they exist. A waiting rank executes operations of all of them.
    """

    def __init__(
        self, memory: SharedMemory, name: str, timeout: float, channels: Sequence[SharedMemoryChannel]
    ) -> None:
        self._memory, self.name, self._timeout, self._channels = memory, name, timeout, channels
        self._base = CHANNELS.index(name) * CHANNEL_BYTES
        starts = [ctypes.addressof(ctypes.c_char.from_buffer(peer.control, self._base)) for peer in memory.peers]
        # The addresses of each rank's counters.
        self._posted, self._summed, self._executed = ([start + i * CACHE_LINE for start in starts] for i in range(3))
        self._lib = memory.lib
        self._all_ranks = tuple(range(memory.world_size))
        self._seq = 0
        self._pending: deque[SharedMemoryWork] = deque()

    # -- operations -------------------------------------------------------------------------------

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, label: str, ranks: tuple[int, ...] | None = None
    ) -> Work:
        """Post the shard; map or read those of the peers once they have posted them."""
        memory = self._memory
        ranks = ranks or self._all_ranks
        own_position = ranks.index(memory.rank)
        nbytes, base = shard.nbytes, full.data_ptr()
        work = self._post(GATHER, label, shard)
        # Only whole pages can be mapped. Other shards are copied.
        mapped = memory.is_mapped(full) and nbytes % mmap.PAGESIZE == 0
        bring = self._map if mapped else self._read
        if mapped:
            # This rank's own shard is mapped like the others, so that the full buffer holds no copy of it.
            own = partial(bring, memory.peers[memory.rank], work.seq, base + own_position * nbytes, nbytes)
            work.steps.append(PeerRead((), (), own))
        elif base + own_position * nbytes != shard.data_ptr():
            full.chunk(len(ranks))[own_position].copy_(shard)
        for position, rank in enumerate(ranks):
            if rank != memory.rank:
                step = partial(bring, memory.peers[rank], work.seq, base + position * nbytes, nbytes)
                work.steps.append(PeerRead(self._posted, (rank,), step))
        return self._issue(work)

    def reduce_scatter(
        self,
        shard: torch.Tensor,
        full: torch.Tensor,
        label: str,
        accumulate: bool = False,
        levels: tuple[int, ...] | None = None,
    ) -> Work:
        """Post ``full``; add all ranks' slices once they have posted theirs."""
        memory = self._memory
        index = memory.rank if levels is None else shard_index(memory.rank, levels)
        work = self._post(REDUCE, label, full)
        own_slice = full[index * shard.numel() : (index + 1) * shard.numel()]
        sharers = [rank for rank in self._all_ranks if levels and shard_index(rank, levels) == index]
        # A sum in place would overwrite what others that have the same slice still read.
        if len(sharers) > 1 and shard.data_ptr() == own_slice.data_ptr():
            self._sum_in_place(work, full, own_slice, sharers)
        else:
            self._sum_slice(work, full, own_slice, shard, accumulate)
        return self._issue(work)

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        """Sum this rank's slice, then read the slices that the peers have summed."""
        work = self._post(REDUCE, label, full)
        self._sum_in_place(work, full, full, self._all_ranks)
        return self._issue(work)

    def _sum_in_place(
        self, work: SharedMemoryWork, full: torch.Tensor, shared_slice: torch.Tensor, sharers: Sequence[int]
    ) -> None:
        """Let each of ``sharers`` sum a part of a slice of ``full``, and then read the parts of the others."""
        memory = self._memory
        parts = dict(zip(sharers, shared_slice.chunk(len(sharers)), strict=True))
        own_part = parts[memory.rank]
        self._sum_slice(work, full, own_part, own_part, accumulate=False)
        own_counter = self._summed[memory.rank]
        # Peers read the sum from this rank's memory, so the counter is raised when it is complete.
        work.steps.append(PeerRead((), (), lambda: self._lib.ze_post(own_counter, work.seq & 0xFFFFFFFF)))
        for rank, part in parts.items():
            if rank != memory.rank:
                start = part.data_ptr() - full.data_ptr()
                read = partial(self._read, memory.peers[rank], work.seq, part.data_ptr(), part.nbytes, start)
                work.steps.append(PeerRead(self._summed, (rank,), read))

    def _sum_slice(
        self,
        work: SharedMemoryWork,
        full: torch.Tensor,
        own_slice: torch.Tensor,
        target: torch.Tensor,
        accumulate: bool,
    ) -> None:
        """Add all ranks' values of a slice of ``full`` into ``target``, once they have posted ``full``."""
        # The kernel adds while it reads. Other dtypes go through copies.
        add = self._sum_kernel if {full.dtype, target.dtype} <= ops.DTYPE_CODES.keys() else self._sum_copies
        start = own_slice.data_ptr() - full.data_ptr()
        read_and_add = partial(add, target, own_slice, work.seq, accumulate, start)
        work.steps.append(PeerRead(self._posted, self._all_ranks, read_and_add))

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """Read the vectors of all ranks, and add them in rank order. Waits for peers."""
        out = torch.empty_like(values)
        work = self._post(SCALARS, label, values)
        add = partial(self._sum_copies, out, values, work.seq, False, 0)
        work.steps.append(PeerRead(self._posted, range(self._memory.world_size), add))
        self._issue(work).wait_host()
        return out

    def reusable(self, work: Work, timeout_s: float) -> bool:
        """See ``interfaces.Channel``: whether every rank has executed the operation."""
        assert isinstance(work, SharedMemoryWork)
        memory = self._memory
        deadline = time.monotonic() + timeout_s
        # This rank comes last. It counts, too, because its sum reads its own memory.
        peers = (*memory.others, memory.peers[memory.rank])
        return all(self._wait_for_counter(self._executed, work.seq, peer.rank, deadline) for peer in peers)

    # -- posting and executing --------------------------------------------------------------------

    def _post(self, kind: int, label: str, sent: torch.Tensor) -> SharedMemoryWork:
        """Announce an operation to the peers. First wait for peers that are ``MAX_POSTED`` operations behind."""
        memory = self._memory
        # A closed engine has closed its descriptors, whose numbers may now belong to other files.
        if memory.closed:
            raise ZeroEngineError("this engine is closed: it cannot gather or reduce any more")
        self._seq += 1
        for peer in memory.others:
            self._require_counter(self._executed, self._seq - MAX_POSTED, peer.rank, "room")
        # This record overwrites an earlier one, whose operation still needs it until it is executed.
        while self._pending and self._pending[0].seq <= self._seq - MAX_POSTED:
            self._pending[0].wait_host()
        record = RECORD.pack(self._seq, kind, sent.nbytes, memory.offset_of(sent), _short_label(label))
        start = self._base + COUNTERS_BYTES + self._seq % MAX_POSTED * RECORD.size
        # ``ze_post`` raises the counter only after the record is visible to other cores.
        memory.control[start : start + RECORD.size] = record
        self._lib.ze_post(self._posted[memory.rank], self._seq & 0xFFFFFFFF)
        return SharedMemoryWork(self, self._seq)

    def _issue(self, work: SharedMemoryWork) -> SharedMemoryWork:
        self._pending.append(work)
        self.progress()
        return work

    def progress(self) -> None:
        """Execute what peers are ready for."""
        if self._pending:
            self.execute(self._pending[-1], block=False)

    def fence(self) -> None:
        """Return when every peer has executed everything that this rank posted."""
        for peer in self._memory.others:
            # The ranks are awaited one by one, so that the error names the stalled rank.
            self._require_counter(self._executed, self._seq, peer.rank, f"rank {peer.rank} to read")

    def drain(self) -> None:
        """Execute everything that is outstanding, waiting for peers."""
        if self._pending:
            self._pending[-1].wait_host()

    def execute(self, last: SharedMemoryWork, block: bool) -> bool:
        """Execute pending operations up to ``last``.

        Args:
            last: The last operation to execute.
            block: Whether to wait for peers. Otherwise stop at the first operation that they are not ready for.

        Returns:
            Whether ``last`` has been executed.
        """
        while self._pending and self._pending[0].seq <= last.seq:
            work = self._pending[0]
            while work.steps:
                step = work.steps[0]
                for rank in step.ranks:
                    if not self._reached(step.counters[rank], work.seq):
                        if not block:
                            return False
                        waiting_for = self._describe(self._memory.rank, work.seq)
                        self._require_counter(step.counters, work.seq, rank, waiting_for)
                # Waiting also executes operations: this step, or all steps, may have been taken meanwhile.
                if work.steps and work.steps[0] is step:
                    # A step is removed after it was taken, so that a later wait repeats a step that raised.
                    step.read()
                    work.steps.popleft()
            if self._pending and self._pending[0] is work:
                self._pending.popleft()
                self._lib.ze_post(self._executed[self._memory.rank], work.seq & 0xFFFFFFFF)
        return True

    def _reached(self, address: int, seq: int) -> bool:
        """Return whether a counter has reached ``seq``, modulo 2^32."""
        # Counters wrap around, so a counter is ahead if its distance is less than half of the range.
        return bool((self._lib.ze_load(address) - seq) & 0xFFFFFFFF < 1 << 31)

    def _require_counter(self, counters: Sequence[int], seq: int, rank: int, waiting_for: str) -> None:
        """Wait for a counter of ``rank``; a stall is an error."""
        if seq > 0 and not self._wait_for_counter(counters, seq, rank, time.monotonic() + self._timeout):
            raise DivergenceError(
                f"rank {self._memory.rank} has waited {self._timeout:g} s (comm.timeout_seconds) for {waiting_for}. "
                f"{self._report()}"
            )

    def _wait_for_counter(self, counters: Sequence[int], seq: int, rank: int, deadline: float) -> bool:
        """Return whether ``rank``'s counter reaches ``seq`` by ``deadline``. Execute operations meanwhile."""
        address = counters[rank]
        while not self._reached(address, seq):
            # The peer may itself wait for this rank, on either channel.
            for channel in self._channels:
                channel.progress()
            # The wait is short, because operations of the other channel may become ready.
            if self._lib.ze_wait(address, seq & 0xFFFFFFFF, POLL_US):
                break
            # The process may have raised the counter just before it ended, so the counter is read again.
            if self._memory.peers[rank].ended() and not self._reached(address, seq):
                raise DivergenceError(f"rank {rank} has ended. {self._report()}")
            if time.monotonic() > deadline:
                return False
        return True

    # -- reads ------------------------------------------------------------------------------------

    def _record(self, rank: int, seq: int) -> tuple[int, int, int, int, str]:
        start = self._base + COUNTERS_BYTES + seq % MAX_POSTED * RECORD.size
        number, kind, nbytes, offset, label = RECORD.unpack_from(self._memory.peers[rank].control, start)
        return number, kind, nbytes, offset, label.rstrip(b"\0").decode(errors="replace")

    def _report(self) -> str:
        """Return a sentence with each rank's last operation on each channel, and what else it waits for."""
        lines = []
        for peer in self._memory.peers:
            last = ", ".join(f"{channel.name}: {channel._describe(peer.rank)}" for channel in self._channels)
            wait = f", and waits for {what}" if (what := peer.wait()) else ""
            lines.append(f"rank {peer.rank}{' (ended)' if peer.ended() else ''} last issued {last}{wait}")
        return "; ".join(lines) + "."

    def _describe(self, rank: int, seq: int | None = None) -> str:
        """Return the last operation of ``rank``, or its number ``seq``, such as ``reduce blocks.7 (number 3)``."""
        last = self._lib.ze_load(self._posted[rank]) if seq is None else seq
        if last == 0:
            return "nothing yet"
        _, kind, _, _, label = self._record(rank, last)
        return f"{KINDS[kind]} {label} (number {last})"

    def _source(self, peer: SharedMemoryPeer, seq: int) -> int:
        """Return the offset that ``peer`` posted.

        Raises:
            DivergenceError: The peer's operation differs from this rank's.
        """
        # Offsets depend on each rank's allocations, so they are not compared.
        number, kind, nbytes, offset, label = self._record(peer.rank, seq)
        own_number, own_kind, own_nbytes, _, own_label = self._record(self._memory.rank, seq)
        if (number, kind, nbytes, label) != (own_number, own_kind, own_nbytes, own_label):
            raise DivergenceError(
                f"the ranks run different units: rank {self._memory.rank} is at {KINDS[own_kind]} {own_label} "
                f"({own_nbytes} bytes), rank {peer.rank} at {KINDS[kind]} {label} ({nbytes} bytes). "
                f"{DIFFERENT_UNITS_ADVICE}."
            )
        return offset

    def _read(self, peer: SharedMemoryPeer, seq: int, address: int, nbytes: int, start: int = 0) -> None:
        # Reading through the file turns a failure into an error. A load from a mapping would raise a signal.
        result = self._lib.ze_pread(peer.fd, address, nbytes, self._source(peer, seq) + start)
        check_result(result, f"reading the memory of rank {peer.rank}")

    def _map(self, peer: SharedMemoryPeer, seq: int, address: int, nbytes: int) -> None:
        result = self._lib.ze_map(address, nbytes, peer.fd, self._source(peer, seq), False)
        check_result(result, f"mapping the memory of rank {peer.rank}")

    def _sum_kernel(self, target: torch.Tensor, own: torch.Tensor, seq: int, accumulate: bool, start: int) -> None:
        """Read every peer's values and add them in rank order, in one pass over the memory.

        Args:
            target: The sum.
            own: This rank's values.
            seq: The number of the operation.
            accumulate: Whether the sum is added to ``target``.
            start: The offset of the values in what each rank posted, in bytes.
        """
        memory, count = self._memory, self._memory.world_size
        local, fds, offsets = (ctypes.c_void_p * count)(), (ctypes.c_int * count)(), (ctypes.c_int64 * count)()
        local[memory.rank] = own.data_ptr()
        for peer in memory.others:
            fds[peer.rank], offsets[peer.rank] = peer.fd, self._source(peer, seq) + start
        result = self._lib.ze_sum(
            *(target.data_ptr(), ops.DTYPE_CODES[target.dtype], accumulate, target.numel()),
            *(ops.DTYPE_CODES[own.dtype], count, local, fds, offsets),
        )
        check_result(result, "reading the memory of a peer rank")

    def _sum_copies(self, target: torch.Tensor, own: torch.Tensor, seq: int, accumulate: bool, start: int) -> None:
        """Do the same as ``_sum_kernel`` for any dtype, over copies of the peers' values."""
        memory = self._memory
        pieces = [own if peer.rank == memory.rank else torch.empty_like(own) for peer in memory.peers]
        for peer in memory.others:
            self._read(peer, seq, pieces[peer.rank].data_ptr(), own.nbytes, start)
        sum_in_rank_order(target, pieces, accumulate)
