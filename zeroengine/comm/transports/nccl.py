"""The transports over a backend's own collectives: NCCL, and torch's ``fake``, with which tests count."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zeroengine.comm.alarm_board import DIFFERENT_UNITS_ADVICE
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Buffer, ChannelName, Levels, Ranks, ResizableBuffer, refill
from zeroengine.comm.sum_writers import SumWriters
from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.comm.watchdog import Watchdog
from zeroengine.errors import DivergenceError, ZeroEngineError
from zeroengine.partition.degrees import Degrees, ranks_of_level
from zeroengine.utils.process_groups import destroy_group
from zeroengine.utils.small_transfers import HostCopy, to_device
from zeroengine.utils.work import Completed, Then, Work, synchronize_stream

# torch 2.13 renamed these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_all_to_all = dist.all_to_all_single
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collective:
    """A collective of torch.distributed under way."""

    def __init__(self, work: dist.Work | None) -> None:
        # None if the backend has nothing to do.
        self._work = work

    def wait_stream(self) -> None:
        """Order the current stream behind it."""
        if self._work is not None:
            self._work.wait()

    def wait_host(self) -> None:
        """Return when the device has run it."""
        self.wait_stream()
        synchronize_stream()

    def done(self) -> bool:
        """Return whether the device has run it."""
        return self._work is None or self._work.is_completed()


class RegisteredPool:
    """A pool of torch's allocator whose memory is registered with the communicator of ``group``.

    NCCL sends from registered memory and receives into it without copies of its own. See "User Buffer Registration" in
    its documentation. The memory that a collective sends from and receives into must be registered with its
    communicator on all ranks or on none. So each channel has a pool of its own, which no other communicator uses.

    Freed memory returns to the pool, so in the long run the same segments serve every unit. torch registers each
    segment when the pool allocates it.

    Raises:
        ZeroEngineError: This torch or its NCCL cannot register memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._device = device
        try:
            backend: Any = group._get_backend(device)
            self._pool: Any = torch.cuda.MemPool(backend.mem_allocator)
            backend.register_mem_pool(self._pool)
        # A torch or an NCCL without registration raises these. Out-of-memory errors are raised as they are.
        except (AttributeError, RuntimeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ZeroEngineError(
                f"comm.register_buffers: torch {torch.__version__} and its NCCL cannot register memory ({reason}): "
                "write false"
            ) from error
        self._backend: Any = backend
        self._registered = True

    def allocations(self) -> AbstractContextManager[None]:
        """Return a context in which torch's allocations on the device are memory of the pool."""
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def close(self) -> None:
        """Wait for the device, and take the memory back from NCCL."""
        if self._registered:
            self._registered = False
            # Collectives may still use the memory.
            torch.cuda.synchronize(self._device)
            self._backend.deregister_mem_pool(self._pool)


class Peers(NamedTuple):
    """What an operation among some of the ranks uses.

    Attributes:
        group: The communicator, whose ranks are in ascending order.
        places: For each rank, in the order of the operation, its place in that order: int64, 1-D, on the channel's
            device. None: the orders are equal.
    """

    group: dist.ProcessGroup
    places: torch.Tensor | None


class NCCLChannel:
    """See ``interfaces.Channel``. Its memory comes from ``pool`` if there is one, else from torch's own allocator."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        watchdog: Watchdog | None,
        pool: RegisteredPool | None = None,
    ) -> None:
        self.group, self._device, self._watchdog, self._pool = group, device, watchdog, pool
        self._rank, self._all_ranks = group.rank(), tuple(range(group.size()))
        # The communicators of parts of the ranks, by the ranks in ascending order.
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # What operations among ``ranks`` use, by the ranks as they are passed.
        self._peers: dict[tuple[int, ...], Peers] = {}
        # Where an operation takes several collectives, those after the first are issued on this stream, so that the
        # computation does not wait for the first.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._writers = SumWriters()
        self._seq = 0
        # A checksum of every operation so far, which the ranks compare at each step.
        self.order = 0
        self.last = "nothing yet"

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized memory, 1-D, to send from and to receive into."""
        with self._allocations():
            return torch.empty(numel, dtype=dtype, device=self._device)

    def refill(self, tensor: torch.Tensor) -> None:
        """Give such memory to a tensor whose storage was emptied."""
        # The storage keeps its identity, so all views of it are valid again, although its address may change.
        with self._allocations():
            refill(tensor)

    def _allocations(self) -> AbstractContextManager[None]:
        return nullcontext() if self._pool is None else self._pool.allocations()

    def add_group(self, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
        """Let operations among ``ranks`` use a communicator. Close it with this transport."""
        self._groups[tuple(sorted(ranks))] = group

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All communicators."""
        return [self.group, *self._groups.values()]

    def _peers_of(self, ranks: tuple[int, ...]) -> Peers:
        # There are few sets of ranks, and each serves many operations, so they are sorted once.
        if ranks not in self._peers:
            ascending = tuple(sorted(ranks))
            group = self.group if ascending == self._all_ranks else self._groups[ascending]
            places = [ascending.index(rank) for rank in ranks]
            self._peers[ranks] = Peers(group, None if ranks == ascending else torch.tensor(places, device=self._device))
        return self._peers[ranks]

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, ranks: Ranks = None) -> Work:
        """Launch an all-gather. Shards that do not lie in the order of their ranks go through a temporary buffer."""
        self.record(f"gather {label}")
        ranks = ranks or self._all_ranks
        if len(ranks) == 1:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return Completed()
        group, places = self._peers_of(ranks)
        if places is None:
            return self.issue(lambda: _all_gather(full, shard, group=group, async_op=True))
        arrived = self.empty(full.numel(), full.dtype)

        def put_in_order() -> None:
            torch.index_select(arrived.view(len(ranks), -1), 0, places, out=full.view(len(ranks), -1))
            arrived.untyped_storage().resize_(0)

        return Then(self.issue(lambda: _all_gather(arrived, shard, group=group, async_op=True)), put_in_order)

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool = False, levels: Levels = None
    ) -> Work:
        """Launch a reduce-scatter. A sum that must be cast or accumulated goes through a temporary buffer."""
        if levels is not None and levels != (len(self._all_ranks),):
            return self._reduce_by_levels(shard, full, label, accumulate, levels)
        # NCCL can neither cast the sum nor add it to its target.
        direct = not accumulate and shard.dtype is full.dtype
        target = shard if direct else self.empty(shard.numel(), full.dtype)
        self.record(f"reduce {label}")
        work = self.issue(lambda: _reduce_scatter(target, full, group=self.group, async_op=True))
        if direct:
            self._writers.record(shard, work)
            return work
        return self._take_over(work, shard, target, accumulate)

    def _reduce_by_levels(
        self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool, levels: tuple[int, ...]
    ) -> Work:
        """Reduce-scatter within each level after another, then sum over the ranks that have the same slice."""
        self.record(f"reduce {label}")
        rank, world_size = self._rank, len(self._all_ranks)
        summed, below, work = full, 1, None
        for level in levels:
            ranks = ranks_of_level(rank, below, level)
            target = self.empty(summed.numel() * below // level, full.dtype)
            reduce = partial(_reduce_scatter, target, summed, group=self._peers_of(ranks).group, async_op=True)
            work, summed, below = self._issue_after(work, reduce), target, level
        if below < world_size:
            group = self._peers_of(ranks_of_level(rank, below, world_size)).group
            work = self._issue_after(work, partial(dist.all_reduce, summed, group=group, async_op=True))
        assert work is not None
        return self._take_over(work, shard, summed, accumulate)

    def _issue_after(self, before: Work | None, run: Callable[[], dist.Work | None]) -> Work:
        """Issue a collective behind the collective ``before``, without making the current stream wait for that."""
        if before is None or self._stream is None:
            if before is not None:
                before.wait_stream()
            return self.issue(run)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            before.wait_stream()
            return self.issue(run)

    def _take_over(self, work: Work, shard: torch.Tensor, target: torch.Tensor, accumulate: bool) -> Work:
        """Return the work that copies or adds the sum in ``target`` to ``shard``, and frees ``target``."""

        def take_over() -> None:
            if accumulate:
                shard.add_(target)
            else:
                shard.copy_(target)
            # The watchdog still holds the work, and so the tensor. This frees its memory now, in stream order.
            target.untyped_storage().resize_(0)

        written = Then(work, take_over, after=self._writers.before(shard, accumulate=accumulate))
        self._writers.record(shard, written)
        return written

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, label: str, ranks: Ranks = None, levels: Levels = None
    ) -> Work:
        """Launch an all-to-all."""
        assert levels is None, "a sum goes level by level"
        self.record(f"exchange {label}")
        ranks = ranks or self._all_ranks
        if len(ranks) == 1:
            received.copy_(sent)
            return Completed()
        return self.issue(lambda: _all_to_all(received, sent, group=self._peers_of(ranks).group, async_op=True))

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        """Launch an all-reduce."""
        self.record(f"reduce {label}")
        return self.issue(lambda: dist.all_reduce(full, group=self.group, async_op=True))

    def reusable(self, work: Work, timeout_s: float) -> bool:
        """See ``Channel.reusable``. With a timeout the current stream waits for ``work``, and the host goes on."""
        if not timeout_s:
            return work.done()
        work.wait_stream()
        return True

    def record(self, what: str) -> None:
        """Add the operation that is issued next to the order that the ranks compare."""
        self._seq += 1
        self.last = f"{what} (number {self._seq})"
        # The checksum covers all operations so far, so ranks that have differed once stay different.
        self.order = zlib.crc32(what.encode(), self.order)

    def issue(self, run: Callable[[], dist.Work | None]) -> Work:
        """Issue the operation that was recorded last."""
        if self._watchdog is None:
            return Collective(run())
        return self._watchdog.issue(self.last, lambda: Collective(run()))


class NCCLTransport(TransportTraits):
    """See ``interfaces.Transport``. Collectives use memory of ``pools`` if there are any, else torch's own.

    ``all_reduce_scalars`` also sums the checksums of the ranks' orders. They are compared later, by ``check_order`` or
    in the next ``all_reduce_scalars``, so that the host does not wait for the device.
    """

    name = "nccl"
    overlaps = True
    runs_on_streams = True
    packed_sums = None
    reduces_by_levels = True
    sums_in_place = False
    registers_memory = True

    def __init__(
        self,
        gather: dist.ProcessGroup,
        reduce: dist.ProcessGroup,
        device: torch.device,
        watchdog: Watchdog | None,
        pools: Mapping[ChannelName, RegisteredPool] | None = None,
        timeout: float | None = None,
    ) -> None:
        self._pools, self._timeout = pools or {}, timeout
        self.rank, self.world_size = gather.rank(), gather.size()
        self._device, self._group, self._watchdog = device, reduce, watchdog
        self.gather = NCCLChannel(gather, device, watchdog, self._pools.get("gather"))
        self.reduce = NCCLChannel(reduce, device, watchdog, self._pools.get("reduce"))
        # The orders that were summed but not yet compared: the sums over ranks of the two channels' checksums, this
        # rank's checksums, and its last operations for people.
        self._orders: tuple[HostCopy, list[float], str] | None = None

    def open_groups(self, degrees: tuple[Degrees, ...], group: Group) -> None:
        """Make the communicators that units of these degrees need. A collective."""
        for channel, rank_sets in (
            (self.gather, (ranks for unit in degrees for ranks in unit.gather_groups(self.rank))),
            (self.reduce, (ranks for unit in degrees for ranks in unit.reduce_groups(self.rank, self.world_size))),
        ):
            for ranks in dict.fromkeys(tuple(sorted(ranks)) for ranks in rank_sets):
                if 1 < len(ranks) < self.world_size:
                    channel.add_group(ranks, group.new_group(group.backend, self._timeout, ranks))

    def empty(self, numel: int, dtype: torch.dtype, channel: ChannelName, *, sent: bool = True) -> torch.Tensor:
        """Return memory of the channel's registered pool, or torch's own."""
        return (self.gather if channel == "gather" else self.reduce).empty(numel, dtype)

    def refill(self, tensor: torch.Tensor, channel: ChannelName | None) -> None:
        """Give memory of the channel's registered pool, or torch's own."""
        fill = {"gather": self.gather.refill, "reduce": self.reduce.refill, None: refill}[channel]
        fill(tensor)

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool = False) -> Buffer:
        """Return a buffer of the gather channel's memory."""
        return ResizableBuffer(self.gather.empty(numel, dtype), self.gather.refill)

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """Sum, together with checksums of the ranks' orders so far."""
        # The sums of the last step have usually arrived by now, so reading them does not wait for the device.
        self.check_order()
        self.reduce.record(label)
        # Checksums are below 2**32, so float64 holds their sums over two million ranks exactly.
        own = [float(self.gather.order), float(self.reduce.order)]
        sent = torch.cat([values, to_device(own, values.device, values.dtype)])
        self.reduce.issue(lambda: dist.all_reduce(sent, group=self._group, async_op=True)).wait_stream()
        # A backend without peers sums nothing, so there is nothing to compare.
        if self.has_peers:
            self._orders = HostCopy(sent[-2:]), own, f"{self.gather.last}, {self.reduce.last}"
        return sent[:-2]

    def check_order(self) -> None:
        """Compare the checksums that the last ``all_reduce_scalars`` summed."""
        if self._orders is None:
            return
        summed, own, last = self._orders
        if summed.read() != [self.world_size * order for order in own]:
            raise DivergenceError(
                f"the ranks have run different units since the start: rank {self.rank} was at {last}. "
                f"{DIFFERENT_UNITS_ADVICE}."
            )
        self._orders = None

    def close(self) -> None:
        """Deregister the pools, and end the watchdog and the communicators."""
        for pool in self._pools.values():
            pool.close()
        # Without a watchdog, as with the fake backend, the groups belong to the caller.
        if self._watchdog is not None:
            self._watchdog.close()
            # After an error a communicator may be stuck in an operation, and ends with the process.
            if sys.exc_info()[0] is None:
                for group in (*self.gather.groups, *self.reduce.groups):
                    destroy_group(group)


class FakeTransport(NCCLTransport):
    """The transport over torch's ``fake`` backend, whose collectives return at once and move nothing."""

    name = "fake"
    has_peers = False
    runs_on_streams = False
    registers_memory = False
