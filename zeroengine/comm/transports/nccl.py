"""The transports over a backend's own collectives: NCCL, and torch's ``fake``, with which tests count."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zeroengine.comm.alarm_board import DIFFERENT_UNITS_ADVICE
from zeroengine.comm.divergence import Divergence
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Buffer, Levels, Ranks, ResizableBuffer, Slices, Transport
from zeroengine.comm.sum_writers import SumWriters
from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.comm.transports.registered_memory import RegisteredMemory
from zeroengine.comm.watchdog import Watchdog
from zeroengine.partition.degrees import Degrees, ranks_of_level
from zeroengine.utils.process_groups import destroy_group
from zeroengine.utils.tensors import HostCopy, to_device
from zeroengine.utils.torch_internals import AllgatherOptions, all_gather_single, reduce_scatter_single
from zeroengine.utils.work import Completed, Then, Work, synchronize_stream

_all_to_all = dist.all_to_all_single
_GATHER_OPTIONS, _REDUCE_OPTIONS = AllgatherOptions(), dist.ReduceScatterOptions()
_GATHER_OPTIONS.asyncOp = _REDUCE_OPTIONS.asyncOp = True
# The names of some operations have a number that may be another one in each step.
_MAX_CHECKSUMS = 1 << 14
# The prime of the FNV hash of 32 bits. It is odd, so that no earlier operation is ever forgotten.
_ORDER_FACTOR = 16777619


def _all_gather(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Launch an all-gather without what torch's function looks up for each call."""
    if full.dtype.is_complex:
        full, shard = torch.view_as_real(full), torch.view_as_real(shard)
    return all_gather_single(group, full, shard, _GATHER_OPTIONS)


def _reduce_scatter(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    if full.dtype.is_complex:
        full, shard = torch.view_as_real(full), torch.view_as_real(shard)
    return reduce_scatter_single(group, shard, full, _REDUCE_OPTIONS)


class _Checksums(dict[str, int]):
    """The checksum of what each operation is called. Nearly all names come again in each step."""

    def __missing__(self, what: str) -> int:
        if len(self) >= _MAX_CHECKSUMS:
            self.clear()
        checksum = self[what] = zlib.crc32(what.encode())
        return checksum


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
    """See ``interfaces.Channel``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, watchdog: Watchdog | None) -> None:
        self.group, self._device, self._watchdog = group, device, watchdog
        self._rank, self._all_ranks = group.rank(), tuple(range(group.size()))
        # The communicators of parts of the ranks, by the ranks in ascending order.
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # What operations among ``ranks`` use, by the ranks as they are passed.
        self._peers: dict[tuple[int, ...], Peers] = {}
        # Where an operation takes several collectives, those after the first are issued on this stream, so that the
        # computation does not wait for the first.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._writers = SumWriters()
        self._seq, self._last = 0, "nothing yet"
        # A checksum of every operation so far, which the ranks compare at each step: a number of 32 bits.
        self.order = 0
        self._checksums = _Checksums()

    def add_group(self, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
        """Let operations among ``ranks`` use a communicator. Close it with this transport."""
        self._groups[tuple(sorted(ranks))] = group

    def has_group(self, ranks: tuple[int, ...]) -> bool:
        """Return whether ``ranks`` have a communicator of their own."""
        return tuple(sorted(ranks)) in self._groups

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All communicators."""
        return [self.group, *self._groups.values()]

    @property
    def last(self) -> str:
        """The last operation, for people."""
        return f"{self._last} (number {self._seq})"

    def _peers_of(self, ranks: tuple[int, ...]) -> Peers:
        # There are few sets of ranks, and each serves many operations, so they are sorted once.
        if ranks not in self._peers:
            ascending = tuple(sorted(ranks))
            group = self._groups.get(ascending, self.group)
            assert group.size() == len(ranks), "open_groups makes the communicators of parts of the ranks"
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
            return self.issue(_all_gather, full, shard, group=group)
        arrived = ResizableBuffer(torch.empty_like(full))

        def put_in_order() -> None:
            torch.index_select(arrived.tensor.view(len(ranks), -1), 0, places, out=full.view(len(ranks), -1))
            arrived.free()

        return Then(self.issue(_all_gather, arrived.tensor, shard, group=group), put_in_order)

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool = False, levels: Levels = None
    ) -> Work:
        """Launch a reduce-scatter. A sum that must be cast or accumulated goes through a temporary buffer."""
        if levels is not None and levels != (len(self._all_ranks),):
            return self._reduce_by_levels(shard, full, label, accumulate, levels)
        # NCCL can neither cast the sum nor add it to its target.
        direct = not accumulate and shard.dtype is full.dtype
        temporary = None if direct else ResizableBuffer(full.new_empty(shard.numel()))
        target = shard if temporary is None else temporary.tensor
        self.record(f"reduce {label}")
        work = self.issue(_reduce_scatter, target, full, group=self.group)
        if temporary is None:
            self._writers.record(shard, work)
            return work
        return self._take_over(work, shard, target, accumulate, [temporary])

    def _reduce_by_levels(
        self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool, levels: tuple[int, ...]
    ) -> Work:
        """Reduce-scatter within each level after another, then sum over the ranks that have the same slice."""
        self.record(f"reduce {label}")
        rank, world_size = self._rank, len(self._all_ranks)
        # torch's works hold their tensors until any stream waits for them. A side stream waits for all but the last one
        # here, long before the stream that the sums were allocated on does, so they are held until that.
        partial_sums: list[ResizableBuffer] = []
        summed, below, work = full, 1, None
        for level in levels:
            ranks = ranks_of_level(rank, below, level)
            target = full.new_empty(summed.numel() * below // level)
            partial_sums.append(ResizableBuffer(target))
            reduce = partial(_reduce_scatter, target, summed, group=self._peers_of(ranks).group)
            work, summed, below = self._issue_after(work, reduce), target, level
        if below < world_size:
            group = self._peers_of(ranks_of_level(rank, below, world_size)).group
            work = self._issue_after(work, partial(dist.all_reduce, summed, group=group, async_op=True))
        assert work is not None
        return self._take_over(work, shard, summed, accumulate, partial_sums)

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

    def _take_over(
        self,
        work: Work,
        shard: torch.Tensor,
        target: torch.Tensor,
        accumulate: bool,
        temporaries: Sequence[ResizableBuffer],
    ) -> Work:
        """Return the work that copies or adds the sum in ``target`` to ``shard``, and frees the temporaries."""

        def take_over() -> None:
            if accumulate:
                shard.add_(target)
            else:
                shard.copy_(target)
            for temporary in temporaries:
                # The watchdog still holds the works, and so the tensors. This frees the memory now, in stream order.
                temporary.free()

        return self._writers.write(shard, work, take_over, accumulate=accumulate)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, label: str, slices: Slices) -> Work:
        """Launch an all-to-all."""
        assert slices.levels is None, "a sum goes level by level"
        self.record(f"exchange {label}")
        ranks, sizes = slices.ranks or self._all_ranks, slices.sizes
        if len(ranks) == 1:
            received.copy_(sent)
            return Completed()
        group, own = self._peers_of(ranks).group, ranks.index(self._rank)
        incoming = None if sizes is None else [row[own] for row in sizes]
        outgoing = None if sizes is None else list(sizes[own])
        return self.issue(lambda: _all_to_all(received, sent, incoming, outgoing, group=group, async_op=True))

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
        self._seq, self._last = self._seq + 1, what
        # The checksum covers all operations so far, so ranks that have differed once stay different.
        self.order = (self.order * _ORDER_FACTOR + self._checksums[what]) & 0xFFFFFFFF

    def issue(self, run: Callable[..., dist.Work | None], *arguments: Any, **options: Any) -> Work:
        """Issue the operation that was recorded last: call ``run`` with the arguments that follow it."""
        if self._watchdog is None:
            return Collective(run(*arguments, **options))
        return self._watchdog.issue(self.last, lambda: Collective(run(*arguments, **options)))


class NCCLTransport(TransportTraits):
    """See ``interfaces.Transport``.

    ``all_reduce_scalars`` also sums the checksums of the ranks' orders. They are compared later, by ``check_order`` or
    in the next ``all_reduce_scalars``, so that the host does not wait for the device.
    """

    name = "nccl"
    packed_sums = None
    overlaps = True
    runs_on_streams = True
    reduces_by_levels = True
    sums_in_place = False

    def __init__(
        self,
        gather: dist.ProcessGroup,
        reduce: dist.ProcessGroup,
        device: torch.device,
        watchdog: Watchdog | None,
        timeout: float | None = None,
        memory: RegisteredMemory | None = None,
    ) -> None:
        self._timeout, self._memory, self.registers_memory = timeout, memory, memory is not None
        # What memory is allocated in.
        self._allocating = None if memory is None else memory.allocating
        self.rank, self.world_size = gather.rank(), gather.size()
        self._device, self._group, self._watchdog = device, reduce, watchdog
        self.gather = NCCLChannel(gather, device, watchdog)
        self.reduce = NCCLChannel(reduce, device, watchdog)
        # Its communicator is that of the ranks that share a sample, which ``open_groups`` adds.
        self.exchange = NCCLChannel(reduce, device, watchdog)
        # The orders that were summed but not yet compared: the sums over ranks of the two channels' checksums, this
        # rank's checksums, and its last operations for people.
        self._orders: tuple[HostCopy, list[float], str] | None = None

    def open_groups(self, degrees: tuple[Degrees, ...], group: Group, exchanging: tuple[int, ...] = ()) -> Transport:
        """Make the communicators that units of these degrees need, and those of exchanges. A collective."""
        if len(exchanging) > 1 and not self.exchange.has_group(exchanging):
            self.exchange.add_group(exchanging, group.new_group(group.backend, self._timeout, exchanging))
        for channel, rank_sets in (
            (self.gather, (ranks for unit in degrees for ranks in unit.gather_groups(self.rank))),
            (self.reduce, (ranks for unit in degrees for ranks in unit.reduce_groups(self.rank, self.world_size))),
        ):
            for ranks in dict.fromkeys(tuple(sorted(ranks)) for ranks in rank_sets):
                # A change of degrees comes here again.
                if 1 < len(ranks) < self.world_size and not channel.has_group(ranks):
                    part = group.new_group(group.backend, self._timeout, ranks)
                    channel.add_group(ranks, part)
                    if self._memory is not None:
                        self._memory.add_group(part)
        return self

    def empty(self, numel: int, dtype: torch.dtype, *, sent: bool = True) -> torch.Tensor:
        """Return torch's own memory."""
        with nullcontext() if self._allocating is None else self._allocating():
            return torch.empty(numel, dtype=dtype, device=self._device)

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool = False) -> Buffer:
        """Return a buffer of torch's own memory."""
        return ResizableBuffer(self.empty(numel, dtype), self._allocating)

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
            divergence = Divergence() if self._watchdog is None else self._watchdog.divergence
            raise divergence.error(
                f"the ranks have run different units since the start: rank {self.rank} was at {last}. "
                f"{DIFFERENT_UNITS_ADVICE}."
            )
        self._orders = None

    def close(self) -> None:
        """End the watchdog and the communicators."""
        # Without a watchdog, as with the fake backend, the groups belong to the caller.
        if self._watchdog is not None:
            self._watchdog.close()
            # After an error a communicator may be stuck in an operation, and ends with the process.
            if sys.exc_info()[0] is None:
                if self._memory is not None:
                    self._memory.close()
                for group in (*self.gather.groups, *self.reduce.groups, *self.exchange.groups[1:]):
                    destroy_group(group)


class FakeTransport(NCCLTransport):
    """The transport over torch's ``fake`` backend, whose collectives return at once and move nothing."""

    name = "fake"
    has_peers = False
    runs_on_streams = False
