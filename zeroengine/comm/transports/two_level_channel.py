"""One order of operations between the ranks of several hosts. See ``two_level``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch

from zeroengine.comm.buffer_pool import BufferPool, private_memory
from zeroengine.comm.host_layout import HostLayout
from zeroengine.comm.interfaces import Levels, Ranks, Slices
from zeroengine.comm.packing import Packing
from zeroengine.comm.rank_order_sum import sum_in_rank_order, wide_dtype
from zeroengine.comm.transports.gloo import POLL_S, GlooChannel, GlooWork
from zeroengine.comm.transports.shared_memory_channel import Piece, SharedMemoryChannel
from zeroengine.comm.transports.shared_memory_file import SharedMemory
from zeroengine.comm.transports.two_level_sum import ExactExchange, HostExchange, PackedExchange, SumPlan
from zeroengine.comm.transports.two_level_work import TwoLevelWork
from zeroengine.comm.watchdog import Watchdog
from zeroengine.utils.work import Work


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
        # Memory of this rank's file for what came from other hosts. A much larger buffer is left to the operation that
        # needs it.
        allocate = partial(memory.empty, dtype=torch.uint8)
        self._staging: BufferPool[Work] = BufferPool(allocate, of_other_hosts.reusable, largest_multiple=2)
        # Private memory of sums.
        self._spare = private_memory()
        self._seq = 0
        self._pending: deque[TwoLevelWork] = deque()

    # -- operations -------------------------------------------------------------------------------

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, ranks: Ranks = None) -> Work:
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
            return self._issue(TwoLevelWork(self.wait, self.progress, what, iter([exchange]), None, exchange))
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
            self._staging.put_back(staging, shared)

        return self._issue(TwoLevelWork(self.wait, self.progress, what, steps(), within, exchange))

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, label: str, slices: Slices) -> Work:
        """Send every rank its slice directly, also the ranks of this host."""
        what = self._begin("exchange", label)
        exchange = self._exchange("exchange", label, *self._between.slices_to_exchange(received, sent, slices))
        return self._issue(TwoLevelWork(self.wait, self.progress, what, iter([exchange]), None, exchange))

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        """Add the parts of ``full`` as slices that all ranks have."""
        return self.reduce_scatter(full, full, label, levels=())

    def reduce_scatter(
        self,
        shard: torch.Tensor,
        full: torch.Tensor,
        label: str,
        accumulate: bool = False,
        levels: Levels = None,
        packing: Packing | None = None,
    ) -> Work:
        """Add slices exactly within the host, then between hosts, or what packets of these sums hold."""
        levels = (self._layout.world_size,) if levels is None else levels
        what, seq = self._begin("reduce", label), self._seq
        plan, ranks = SumPlan.of_levels(self._layout, levels), self._layout.counterparts
        slices = full.split(shard.numel())
        parts = {i: slices[i].tensor_split(len(plan.sharers))[plan.position] for i in plan.hosts_of}
        numel = parts[plan.index].numel()
        exchange: HostExchange
        if packing is None:
            exchange = ExactExchange(plan, numel, wide_dtype(full.dtype), self._spare)
        else:
            exchange = PackedExchange(plan, numel, self._spare, packing, (label, levels))
        received = dict(zip(ranks, exchange.received, strict=True))
        receives = self._between.post_receives("reduce", label, received, seq)
        works: list[GlooWork] = []

        def send() -> None:
            sent = dict(zip(ranks, exchange.sent(), strict=True))
            work = self._between.exchange("reduce", label, sent, received, seq, receives)
            work.watch()
            works.append(work)

        within = self._within.sum_slices(full, label, [(parts[i], exchange.sums[i]) for i in parts], send)

        def steps() -> Iterator[Work]:
            yield within
            yield works[0]
            second = exchange.second()
            if second is not None:
                sent, arrived = ({ranks[host]: tensor for host, tensor in by_host.items()} for by_host in second)
                yield self._exchange("sum", label, sent, arrived, seq)
            if len(plan.sharers) == 1:
                exchange.write(shard, accumulate)
            else:
                # What is added to older values is rounded only afterwards.
                target = torch.empty_like(shard, dtype=wide_dtype(full.dtype)) if accumulate else shard
                yield from self._share_sum(target, exchange, label, plan)
                if accumulate:
                    sum_in_rank_order(shard, [target], accumulate=True)
            exchange.close()

        return self._issue(TwoLevelWork(self.wait, self.progress, what, steps(), within))

    def _share_sum(self, target: torch.Tensor, exchange: HostExchange, label: str, plan: SumPlan) -> Iterator[Work]:
        """Write this rank's part of the sum, and read the parts of the other ranks with the same slice."""
        parts = target.tensor_split(len(plan.sharers))
        # The first part is the longest. All ranks post equally many bytes.
        staging = self._staging.take(parts[0].numel(), target.dtype)
        exchange.write(staging[: parts[plan.position].numel()], False)
        reads = [
            Piece(peer, 0, part.data_ptr(), part.nbytes)
            for peer, part in zip(plan.sharers, parts, strict=True)
            if part.numel()
        ]
        shared = self._of_other_hosts.share(staging, label, reads)
        yield shared
        self._staging.put_back(staging, shared)

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
                if work.current is not None:
                    self._watchdog.divergence.check(work.what)
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

    def staging_bytes(self) -> int:
        """Return the bytes of the memory between hosts and the engine's buffers."""
        return self._staging.nbytes + self._spare.nbytes
