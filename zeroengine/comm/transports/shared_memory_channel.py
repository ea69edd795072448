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
from zeroengine.comm.alarm_board import SAME_CALLS_ADVICE, compare_forwards
from zeroengine.comm.interfaces import Levels, Ranks, Slices
from zeroengine.comm.transports.shared_memory_file import (
    CACHE_LINE,
    CHANNEL_BYTES,
    CHANNELS,
    COUNTERS_BYTES,
    MAX_POSTED,
    RECORD,
    SharedMemory,
)
from zeroengine.comm.transports.shared_memory_reads import EXCHANGE, GATHER, KINDS, REDUCE, SCALARS, PeerReads
from zeroengine.errors import ZeroEngineError
from zeroengine.partition.degrees import shard_index
from zeroengine.utils.work import Work

POLL_US = 2000


def _short_label(label: str) -> bytes:
    """Return at most 100 bytes, which differ for different labels."""
    encoded = label.encode()
    return encoded if len(encoded) <= 100 else encoded[:91] + b"~%08x" % zlib.crc32(encoded)


class Piece(NamedTuple):
    """A part of what a rank sends, and where it goes."""

    rank: int
    start: int  # bytes from the beginning of what the rank sends
    target: int  # an address of this process
    nbytes: int


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
        progress_others: Called while this rank waits: takes steps of operations that build on these channels.
        report: Returns a sentence with each rank's position, for errors. None: these channels are all there is.
    """

    def __init__(
        self,
        memory: SharedMemory,
        name: str,
        timeout: float,
        channels: Sequence[SharedMemoryChannel],
        progress_others: Callable[[], None] | None = None,
        report: Callable[[], str] | None = None,
    ) -> None:
        self._memory, self.name, self._timeout, self._channels = memory, name, timeout, channels
        self._progress_others, self._report = progress_others, report or self._positions
        self._base = CHANNELS.index(name) * CHANNEL_BYTES
        starts = [ctypes.addressof(ctypes.c_char.from_buffer(peer.control, self._base)) for peer in memory.peers]
        # The addresses of each rank's counters.
        self._posted, self._summed, self._executed = ([start + i * CACHE_LINE for start in starts] for i in range(3))
        self._lib, self._reads = memory.lib, PeerReads(memory, self._base)
        self._all_ranks = tuple(range(memory.world_size))
        self._seq = 0
        self._pending: deque[SharedMemoryWork] = deque()

    # -- operations -------------------------------------------------------------------------------

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, ranks: Ranks = None) -> Work:
        """Post the shard; map or read those of the peers once they have posted them."""
        nbytes, base = shard.nbytes, full.data_ptr()
        pieces = [Piece(rank, 0, base + i * nbytes, nbytes) for i, rank in enumerate(ranks or self._all_ranks)]
        return self.share(shard, label, pieces, into=full)

    def share(
        self, sent: torch.Tensor, label: str, pieces: Sequence[Piece], into: torch.Tensor | None = None
    ) -> SharedMemoryWork:
        """Post ``sent``; map or read pieces of what the ranks have posted.

        Args:
            sent: 1-D, as long on every rank.
            label: The unit's name.
            pieces: What this rank reads, of its own memory as well.
            into: The full buffer that the pieces go to, if they may be mapped.
        """
        memory = self._memory
        work = self._post(GATHER, label, sent)
        # Only whole pages can be mapped. Other pieces are copied.
        mapped = into is not None and memory.is_mapped(into) and sent.nbytes % mmap.PAGESIZE == 0
        bring = self._reads.map if mapped else self._reads.read
        # This rank's own piece comes first, because it is ready. It is mapped like the others, so that the full buffer
        # holds no copy of it.
        for piece in sorted(pieces, key=lambda piece: piece.rank != memory.rank):
            is_own = piece.rank == memory.rank
            if is_own and not mapped and piece.target == sent.data_ptr() + piece.start:
                continue
            step = partial(bring, memory.peers[piece.rank], work.seq, piece.target, piece.nbytes, piece.start)
            work.steps.append(PeerRead(self._posted, () if is_own else (piece.rank,), step))
        return self._issue(work)

    def sum_slices(
        self,
        full: torch.Tensor,
        label: str,
        slices: Sequence[tuple[torch.Tensor, torch.Tensor]],
        then: Callable[[], None],
    ) -> SharedMemoryWork:
        """Post ``full``; add all ranks' values of some slices of it.

        Args:
            full: 1-D.
            label: The unit's name.
            slices: Slices of ``full``, each with the target of its sum.
            then: Called when all sums are complete.
        """
        work = self._post(REDUCE, label, full)
        for own_slice, target in slices:
            if own_slice.numel():
                self._sum_slice(work, full, own_slice, target, accumulate=False)
        work.steps.append(PeerRead((), (), then))
        return self._issue(work)

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool = False, levels: Levels = None
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

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, label: str, slices: Slices) -> Work:
        """Post ``sent``; read this rank's slice of every peer."""
        memory, sizes = self._memory, slices.sizes
        # The ranks of several hosts are numbered from 0 on each of them here.
        ranks = [rank % memory.world_size for rank in slices.ranks or self._all_ranks]
        own_position = ranks.index(memory.rank)
        if sizes is None:
            arrived = received.chunk(len(ranks))
            number = own_position if slices.levels is None else shard_index(memory.rank, slices.levels)
            starts = [number * arrived[0].numel()] * len(ranks)
        else:
            arrived = received.split([row[own_position] for row in sizes])
            starts = [sum(row[:own_position]) for row in sizes]
        # The ranks compare the bytes of an operation, and of one with slices of unequal size those of all ranks.
        nbytes = sent.nbytes if sizes is None else sum(map(sum, sizes)) * sent.itemsize
        work = self._post(EXCHANGE, label, sent, nbytes)
        arrived[own_position].copy_(sent[starts[own_position] :][: arrived[own_position].numel()])
        for rank, target, first in zip(ranks, arrived, starts, strict=True):
            if rank != memory.rank and target.numel():
                destination = target.data_ptr(), target.nbytes, first * sent.itemsize
                read = partial(self._reads.read, memory.peers[rank], work.seq, *destination)
                work.steps.append(PeerRead(self._posted, (rank,), read))
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
                read = partial(self._reads.read, memory.peers[rank], work.seq, part.data_ptr(), part.nbytes, start)
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
        add = self._reads.sum_kernel if {full.dtype, target.dtype} <= ops.DTYPE_CODES.keys() else self._reads.sum_copies
        start = own_slice.data_ptr() - full.data_ptr()
        read_and_add = partial(add, target, own_slice, work.seq, accumulate, start)
        work.steps.append(PeerRead(self._posted, self._all_ranks, read_and_add))

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """Read the vectors of all ranks, and add them in rank order. Waits for peers."""
        out = torch.empty_like(values)
        work = self._post(SCALARS, label, values)
        add = partial(self._reads.sum_copies, out, values, work.seq, False, 0)
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

    def _post(self, kind: int, label: str, sent: torch.Tensor, nbytes: int | None = None) -> SharedMemoryWork:
        """Announce an operation to the peers. First wait for peers that are ``MAX_POSTED`` operations behind."""
        memory = self._memory
        # A closed engine has closed its descriptors, whose numbers may now belong to other files.
        if memory.closed:
            raise ZeroEngineError(
                "this engine is closed, or belongs to the parent of this process: it cannot gather or reduce here"
            )
        memory.divergence.check(f"{KINDS[kind]} {label}")
        self._seq += 1
        for peer in memory.others:
            self._require_counter(self._executed, self._seq - MAX_POSTED, peer.rank, "room")
        # This record overwrites an earlier one, whose operation still needs it until it is executed.
        while self._pending and self._pending[0].seq <= self._seq - MAX_POSTED:
            self._pending[0].wait_host()
        # Nothing has no address, and no peer reads it.
        offset = memory.offset_of(sent) if sent.numel() else 0
        nbytes, num_forwards = sent.nbytes if nbytes is None else nbytes, memory.divergence.num_forwards
        record = RECORD.pack(self._seq, kind, nbytes, offset, _short_label(label), *num_forwards)
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
            self._require_counter(self._executed, self._seq, peer.rank, f"{self._memory.name_of(peer.rank)} to read")

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
            raise self._memory.divergence.error(
                f"{self._memory.name_of(self._memory.rank)} has waited {self._timeout:g} s (comm.timeout_seconds) for "
                f"{waiting_for}. "
                f"{self._report()}"
            )

    def _wait_for_counter(self, counters: Sequence[int], seq: int, rank: int, deadline: float) -> bool:
        """Return whether ``rank``'s counter reaches ``seq`` by ``deadline``. Execute operations meanwhile."""
        address = counters[rank]
        while not self._reached(address, seq):
            self._memory.divergence.check("a wait for other ranks")
            # The peer may itself wait for this rank, on either channel.
            for channel in self._channels:
                channel.progress()
            if self._progress_others is not None:
                self._progress_others()
            # The wait is short, because operations of the other channel may become ready.
            if self._lib.ze_wait(address, seq & 0xFFFFFFFF, POLL_US):
                break
            # The process may have raised the counter just before it ended, so the counter is read again.
            if self._memory.peers[rank].ended() and not self._reached(address, seq):
                raise self._memory.divergence.error(f"{self._memory.name_of(rank)} has ended. {self._report()}")
            if failure := self._memory.peers[rank].failure():
                text = f"{self._memory.name_of(rank)} has failed: {failure}. {self._report()}"
                raise self._memory.divergence.error(text)
            if time.monotonic() > deadline:
                return False
        return True

    # -- messages ----------------------------------------------------------------------------------

    def _positions(self) -> str:
        """Return each rank's last operation on each channel, and what else it waits for, with advice."""
        lines = []
        for peer in self._memory.peers:
            last = ", ".join(f"{channel.name}: {channel._describe(peer.rank)}" for channel in self._channels)
            wait = f", and waits for {what}" if (what := peer.wait()) else ""
            name = self._memory.name_of(peer.rank) + (" (ended)" if peer.ended() else "")
            lines.append(f"{name} last issued {last}{wait}")
        ranks = enumerate(self._memory.numbers)
        forwards = compare_forwards({number: self._num_forwards(rank) for rank, number in ranks})
        return f"{'; '.join(lines)}. {forwards}{SAME_CALLS_ADVICE}."

    def _num_forwards(self, rank: int) -> list[int]:
        """Return the largest ``Divergence.num_forwards`` of the last operations of ``rank``."""
        records = [channel._reads.record(rank, self._lib.ze_load(channel._posted[rank])) for channel in self._channels]
        return max(list(record[5:]) for record in records)

    def _describe(self, rank: int, seq: int | None = None) -> str:
        """Return the last operation of ``rank``, or its number ``seq``, such as ``reduce blocks.7 (number 3)``."""
        last = self._lib.ze_load(self._posted[rank]) if seq is None else seq
        if last == 0:
            return "nothing yet"
        _, kind, _, _, label, *_ = self._reads.record(rank, last)
        return f"{KINDS[kind]} {label} (number {last})"
