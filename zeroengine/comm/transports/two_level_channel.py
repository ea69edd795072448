"""One order of operations between the ranks of several hosts. See ``two_level``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from zeroengine.comm.host_layout import HostLayout
from zeroengine.comm.rank_order_sum import sum_in_rank_order, wide_dtype
from zeroengine.comm.transports.gloo import GlooChannel, GlooWork
from zeroengine.comm.transports.shared_memory_channel import Piece, SharedMemoryChannel, SharedMemoryWork
from zeroengine.comm.transports.shared_memory_file import SharedMemory
from zeroengine.comm.watchdog import Watchdog
from zeroengine.errors import ZeroEngineError
from zeroengine.partition.degrees import shard_index
from zeroengine.utils.work import Work

# The seconds that a rank waits for other hosts before it looks whether the ranks of its own host are ready.
POLL_S = 0.002


class TwoLevelWork:
    """An operation whose steps are works, each of which starts when the previous one is done.

    Args:
        channel: The channel.
        what: The operation, for people.
        steps: Yields the works.
        within: The first step in shared memory. Peers have read what was sent when they have executed it.
        exchange: The exchange that sends from memory of the caller, if there is one.
    """

    def __init__(
        self,
        channel: TwoLevelChannel,
        what: str,
        steps: Iterator[Work],
        within: SharedMemoryWork | None,
        exchange: GlooWork | None = None,
    ) -> None:
        self.channel, self.what, self.within, self.exchange = channel, what, within, exchange
        self._steps = steps
        self.current: Work | None = next(steps)
        self._is_advancing = False
        self._error: Exception | None = None

    def advance(self) -> bool:
        """Take the steps that are ready. Return whether all were taken."""
        # A step may wait for room in shared memory, which takes steps of all operations, but not of this one.
        if self._is_advancing:
            return False
        if self._error is not None:
            raise self._error
        self._is_advancing = True
        try:
            while self.current is not None and self.current.done():
                # This raises the error of a work that failed.
                self.current.wait_host()
                self._take_step()
        finally:
            self._is_advancing = False
        return self.current is None

    def _take_step(self) -> None:
        try:
            self.current = next(self._steps, None)
        except BaseException as error:
            # The step is half done and cannot be repeated, so every later wait raises as well.
            interrupted = ZeroEngineError(f"{self.what} was interrupted")
            self._error = error if isinstance(error, Exception) else interrupted
            raise

    def wait_host(self) -> None:
        """Take all steps of this operation and of those before it."""
        self.channel.wait(self)

    wait_stream = wait_host

    def done(self) -> bool:
        """Take the steps that are ready, and return whether all were taken."""
        if self.current is not None:
            self.channel.progress()
        return self.current is None


class StagingPool:
    """Memory of this rank's file for what came from other hosts, which the ranks of its host read.

    Args:
        memory: The memory files.
        channel: The channel that the memory is shared on.
    """

    def __init__(self, memory: SharedMemory, channel: SharedMemoryChannel) -> None:
        self._memory, self._channel = memory, channel
        self._idle: list[tuple[torch.Tensor, Work]] = []
        self.nbytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory, 1-D, that no rank reads any more."""
        size = numel * dtype.itemsize
        # A much larger buffer is left to the operation that needs it.
        fitting = [item for item in self._idle if size <= item[0].numel() <= 2 * size]
        for item in sorted(fitting, key=lambda item: item[0].numel()):
            if self._channel.reusable(item[1], 0.0):
                self._idle = [other for other in self._idle if other is not item]
                return item[0][:size].view(dtype)
        self.nbytes += size
        return self._memory.empty(size, torch.uint8).view(dtype)

    def give_back(self, tensor: torch.Tensor, work: Work) -> None:
        """Take memory back that ``work`` has shared."""
        whole = tensor.untyped_storage()
        self._idle.append((torch.empty(0, dtype=torch.uint8, device="cpu").set_(whole), work))


class TwoLevelChannel:
    """See ``interfaces.Channel``.

    Args:
        layout: The hosts.
        memory: The memory files of this host's ranks.
        within: Operations within the host.
        of_other_hosts: Operations within the host on what came from other hosts.
        between: Operations between hosts.
        watchdog: Reports stalls.
        progress: Takes steps of all channels.
    """

    def __init__(
        self,
        layout: HostLayout,
        memory: SharedMemory,
        within: SharedMemoryChannel,
        of_other_hosts: SharedMemoryChannel,
        between: GlooChannel,
        watchdog: Watchdog,
        progress: Callable[[], None],
    ) -> None:
        self._layout, self._within, self._of_other_hosts, self._between = layout, within, of_other_hosts, between
        self._watchdog, self._progress_all = watchdog, progress
        self._staging = StagingPool(memory, of_other_hosts)
        # Private memory of sums that is free again, by length and dtype, and the bytes of all of it.
        self._spare: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._spare_bytes = 0
        self._seq = 0
        self._pending: deque[TwoLevelWork] = deque()

    # -- operations -------------------------------------------------------------------------------

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, label: str, ranks: tuple[int, ...] | None = None
    ) -> Work:
        """Send the shard to the counterparts; share it, and what comes from them, with the ranks of this host."""
        layout, size = self._layout, self._layout.ranks_per_host
        ranks = ranks or tuple(range(layout.world_size))
        what = self._begin("gather", label)
        targets = {rank: full.data_ptr() + i * shard.nbytes for i, rank in enumerate(ranks)}
        peers = [rank % size for rank in ranks if rank // size == layout.host]
        own_host = [Piece(peer, 0, targets[layout.host * size + peer], shard.nbytes) for peer in peers]
        others = [rank for rank in ranks if rank % size == layout.local and rank != layout.rank]
        if not others:
            within = self._within.share(shard, label, own_host, into=full)
            self._progress_all()
            return within
        received = {layout.rank: shard}
        if len(peers) == 1:
            # No other rank of this host gathers this, so it goes where it belongs.
            slices = dict(zip(ranks, full.split(shard.numel()), strict=True))
            if slices[layout.rank].data_ptr() != shard.data_ptr():
                slices[layout.rank].copy_(shard)
            received |= {rank: slices[rank] for rank in others}
            exchange = self._exchange("gather", label, dict.fromkeys(received, shard), received)
            return self._issue(TwoLevelWork(self, what, iter([exchange]), None, exchange))
        staging = self._staging.take(len(others) * shard.numel(), shard.dtype)
        received |= zip(others, staging.split(shard.numel()), strict=True)
        exchange = self._exchange("gather", label, dict.fromkeys(received, shard), received)
        within = self._within.share(shard, label, own_host, into=full)
        pieces = [
            Piece(peer, i * shard.nbytes, targets[rank // size * size + peer], shard.nbytes)
            for peer in peers
            for i, rank in enumerate(others)
        ]

        def steps() -> Iterator[Work]:
            yield within
            yield exchange
            shared = self._of_other_hosts.share(staging, label, pieces)
            yield shared
            self._staging.give_back(staging, shared)

        return self._issue(TwoLevelWork(self, what, steps(), within, exchange))

    def reduce_scatter(
        self,
        shard: torch.Tensor,
        full: torch.Tensor,
        label: str,
        accumulate: bool = False,
        levels: tuple[int, ...] | None = None,
    ) -> Work:
        """Add slices within the host, then between hosts."""
        levels = (self._layout.world_size,) if levels is None else levels
        return self._reduce(shard, full, label, accumulate, levels)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        label: str,
        ranks: tuple[int, ...] | None = None,
        levels: tuple[int, ...] | None = None,
    ) -> Work:
        """Send every rank its slice directly, also the ranks of this host."""
        what = self._begin("exchange", label)
        slices = self._between.slices_to_exchange(received, sent, ranks, levels)
        exchange = self._exchange("exchange", label, *slices)
        return self._issue(TwoLevelWork(self, what, iter([exchange]), None, exchange))

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        """Add the parts of ``full`` as slices that all ranks have."""
        return self._reduce(full, full, label, False, ())

    def _reduce(
        self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool, levels: tuple[int, ...]
    ) -> Work:
        layout, size = self._layout, self._layout.ranks_per_host
        what = self._begin("reduce", label)
        index = shard_index(layout.rank, levels)
        # Ranks of this host with the same slice add a part of it each.
        first = layout.host * size
        sharers = [peer for peer in range(size) if shard_index(first + peer, levels) == index]
        position = sharers.index(layout.local)
        # The slice of each counterpart, and the hosts whose counterparts have the same one.
        needed = [shard_index(rank, levels) for rank in layout.counterparts]
        hosts_of = {i: [host for host, other in enumerate(needed) if other == i] for i in needed}
        # Sums for more than two hosts are cut once more: each host adds a piece, and they exchange the pieces. For two
        # hosts this would move as many bytes, in two exchanges.
        num_cuts = len(hosts_of[index]) if len(hosts_of[index]) > 2 else 1
        slices = full.split(shard.numel())
        own_parts = {i: slices[i].tensor_split(len(sharers))[position] for i in hosts_of}
        wide = wide_dtype(full.dtype)
        sums = {i: self._take_spare(part.numel(), wide) for i, part in own_parts.items()}

        def cut(host: int) -> torch.Tensor:
            """Return what this rank sends to the counterpart on a host."""
            same = hosts_of[needed[host]]
            return sums[needed[host]].tensor_split(num_cuts)[same.index(host) if num_cuts > 1 else 0]

        own = cut(layout.host)
        pieces = [own if host == layout.host else self._take_spare(own.numel(), wide) for host in range(len(needed))]
        exchanges: list[GlooWork] = []

        seq, received = self._seq, dict(zip(layout.counterparts, pieces, strict=True))
        receives = self._between.post_receives("reduce", label, received, seq)

        def send() -> None:
            sent = {rank: cut(host) for host, rank in enumerate(layout.counterparts)}
            exchange = self._between.exchange("reduce", label, sent, received, seq, receives)
            exchange.watch()
            exchanges.append(exchange)

        within = self._within.sum_slices(full, label, [(own_parts[i], sums[i]) for i in sums], send)

        def steps() -> Iterator[Work]:
            yield within
            yield exchanges[0]
            added = pieces
            if num_cuts > 1:
                sum_in_rank_order(own, pieces, accumulate=False)
                total = sums[index]
                cuts = {
                    layout.counterparts[host]: piece
                    for host, piece in zip(hosts_of[index], total.tensor_split(num_cuts), strict=True)
                }
                yield self._exchange("sum", label, dict.fromkeys(cuts, own), cuts, seq)
                added = [total]
            if len(sharers) == 1:
                sum_in_rank_order(shard, added, accumulate)
            else:
                yield from self._share_sum(shard, added, label, accumulate, sharers, position)
            for tensor in (*sums.values(), *(piece for piece in pieces if piece is not own)):
                self._spare[tensor.numel(), wide].append(tensor)

        return self._issue(TwoLevelWork(self, what, steps(), within))

    def _share_sum(
        self,
        shard: torch.Tensor,
        pieces: Sequence[torch.Tensor],
        label: str,
        accumulate: bool,
        sharers: Sequence[int],
        position: int,
    ) -> Iterator[Work]:
        """Add ``pieces``, this rank's part of the sum, and read the parts of the other ranks with the same slice."""
        # What is added to older values is rounded only afterwards.
        target = torch.empty_like(shard, dtype=pieces[0].dtype) if accumulate else shard
        parts = target.tensor_split(len(sharers))
        # The first part is the longest. All ranks post equally many bytes.
        staging = self._staging.take(parts[0].numel(), target.dtype)
        sum_in_rank_order(staging[: parts[position].numel()], pieces, accumulate=False)
        reads = [
            Piece(peer, 0, part.data_ptr(), part.nbytes)
            for peer, part in zip(sharers, parts, strict=True)
            if part.numel()
        ]
        shared = self._of_other_hosts.share(staging, label, reads)
        yield shared
        self._staging.give_back(staging, shared)
        if accumulate:
            sum_in_rank_order(shard, [target], accumulate=True)

    def reusable(self, work: Work, timeout_s: float) -> bool:
        """See ``interfaces.Channel``: whether the ranks of this host have read it, and it was sent to the others."""
        if not isinstance(work, TwoLevelWork):
            return self._within.reusable(work, timeout_s)
        if work.exchange is not None and not work.exchange.done_within(timeout_s):
            return False
        return work.within is None or self._within.reusable(work.within, timeout_s)

    # -- issuing and waiting ----------------------------------------------------------------------

    def _begin(self, kind: str, label: str) -> str:
        """Record the next operation, and return its name."""
        self._seq += 1
        what = f"{kind} {label} (number {self._seq})"
        self._watchdog.record(what)
        return what

    def _exchange(
        self,
        kind: str,
        label: str,
        sent: dict[int, torch.Tensor],
        received: dict[int, torch.Tensor],
        seq: int = 0,
    ) -> GlooWork:
        exchange = self._between.exchange(kind, label, sent, received, seq or self._seq)
        # Without a thread that waits, nothing would tell when it is done.
        exchange.watch()
        return exchange

    def _issue(self, work: TwoLevelWork) -> TwoLevelWork:
        self._pending.append(work)
        self._progress_all()
        return work

    def progress(self) -> None:
        """Take the steps that are ready, in the order of issue."""
        self._within.progress()
        while self._pending:
            first = self._pending[0]
            if not first.advance():
                return
            if self._pending and self._pending[0] is first:
                self._pending.popleft()

    def wait(self, work: TwoLevelWork) -> None:
        """Take all steps of the operations up to ``work``, waiting for peers."""
        with self._watchdog.guard(work.what):
            while work.current is not None:
                self._progress_all()
                current = self._pending[0].current if self._pending else None
                if isinstance(current, GlooWork):
                    current.done_within(POLL_S)
                elif current is not None:
                    # This executes the operations of all channels meanwhile.
                    current.wait_host()

    def drain(self) -> None:
        """Finish everything that is outstanding, waiting for peers."""
        if self._pending:
            self._pending[-1].wait_host()

    # -- memory -----------------------------------------------------------------------------------

    def _take_spare(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        spare = self._spare.setdefault((numel, dtype), [])
        if spare:
            return spare.pop()
        self._spare_bytes += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype, device="cpu")

    def staging_bytes(self) -> int:
        """Return the bytes of the memory between hosts and the engine's buffers."""
        return self._staging.nbytes + self._spare_bytes
