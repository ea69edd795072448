"""What the ranks of several hosts exchange for one sum. See "Steps" in ``two_level``."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from zeroengine import ops
from zeroengine.comm.buffer_pool import BufferPool
from zeroengine.comm.host_layout import HostLayout
from zeroengine.comm.packing import Packing, is_quantizable
from zeroengine.comm.rank_order_sum import sum_in_rank_order, wide_dtype
from zeroengine.partition.degrees import shard_index
from zeroengine.utils.work import Work


@dataclass(frozen=True)
class SumPlan:
    """The slices of a buffer that a rank adds within its host, and the hosts that need the sums.

    Attributes:
        host: The number of this rank's host.
        slices: For each host, the number of the slice that this rank's counterpart there has.
        sharers: The numbers, within the host, of its ranks that have this rank's slice. Each adds a part of it.
        position: This rank's place among them.
    """

    host: int
    slices: tuple[int, ...]
    sharers: tuple[int, ...]
    position: int

    # A model has few levels, and each serves every unit.
    @staticmethod
    @cache
    def of_levels(layout: HostLayout, levels: tuple[int, ...]) -> SumPlan:
        """Return the plan of a sum whose slices ``levels`` number (``partition.degrees.shard_index``)."""
        index, first = shard_index(layout.rank, levels), layout.host * layout.ranks_per_host
        local_ranks = range(layout.ranks_per_host)
        sharers = tuple(local for local in local_ranks if shard_index(first + local, levels) == index)
        slices = tuple(shard_index(rank, levels) for rank in layout.counterparts)
        return SumPlan(layout.host, slices, sharers, sharers.index(layout.local))

    @property
    def index(self) -> int:
        """The number of this rank's slice."""
        return self.slices[self.host]

    @cached_property
    def hosts_of(self) -> dict[int, list[int]]:
        """For each slice, the hosts whose counterparts have it."""
        return {i: [host for host, other in enumerate(self.slices) if other == i] for i in self.slices}

    @cached_property
    def num_cuts(self) -> int:
        """The number of pieces of a sum, each of which one host completes."""
        # Sums for more than two hosts are cut: each host adds a piece, and they exchange the pieces. For two hosts this
        # would move as many bytes, in two exchanges.
        count = len(self.hosts_of[self.index])
        return count if count > 2 else 1

    def cut_for(self, host: int) -> tuple[int, int]:
        """Return the slice, and the number of its piece, that a host gets."""
        index = self.slices[host]
        return index, self.hosts_of[index].index(host) if self.num_cuts > 1 else 0

    def piece_for(self, host: int, sums: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the piece of ``sums``, by the number of a slice, that a host gets."""
        index, cut = self.cut_for(host)
        return sums[index].tensor_split(self.num_cuts)[cut]


@dataclass(frozen=True)
class SumSizes:
    """The sizes of what one rank holds and sends for one sum, as the exchanges below take it.

    Attributes:
        part: The elements of this rank's part of a slice.
        num_slices: The slices that the ranks of this rank's number on all hosts have.
        num_cuts: ``SumPlan.num_cuts``.
        num_hosts: The number of hosts.
        is_shared: Whether other ranks of the host have the same slice.
    """

    part: int
    num_slices: int
    num_cuts: int
    num_hosts: int
    is_shared: bool

    @classmethod
    def of_sum(cls, layout: HostLayout, levels: tuple[int, ...], numel: int) -> SumSizes:
        """Return the sizes for a buffer of ``numel`` elements. See ``SumPlan.of_levels``."""
        plan = SumPlan.of_levels(layout, levels)
        part = numel // (levels[-1] if levels else 1) // len(plan.sharers)
        return cls(part, len(plan.hosts_of), plan.num_cuts, layout.num_hosts, len(plan.sharers) > 1)

    @property
    def numel(self) -> int:
        """The elements of the sums within the host."""
        return self.part * self.num_slices

    def held_bytes(self, dtype: torch.dtype, bits: int | None) -> int:
        """Return the bytes of the sums within the host, of what arrives, and of a sum that the host shares.

        Args:
            dtype: The dtype of the values.
            bits: The bits of an integer in packets. None: sums travel exactly.
        """
        numel = self.numel + self.part * self.is_shared
        if bits is None or not is_quantizable(dtype):
            return (numel + self.part // self.num_cuts * (self.num_hosts - 1)) * wide_dtype(dtype).itemsize
        # One packet more for each host that gets another piece, and after the exchange those of a sum's pieces.
        num_packets = self.num_hosts + self.num_slices * self.num_cuts
        if self.num_cuts > 1:
            numel += -(-self.part // self.num_cuts)
            num_packets += self.num_cuts
        return numel * torch.float32.itemsize + num_packets * ops.packet_bytes(-(-self.part // self.num_cuts), bits)

    def sent_bytes(self, dtype: torch.dtype, bits: int | None) -> int:
        """Return the bytes that go to other hosts. See ``held_bytes``."""
        numel = self.part // self.num_cuts
        is_packed = bits is not None and is_quantizable(dtype)
        nbytes = ops.packet_bytes(numel, bits or 0) if is_packed else numel * wide_dtype(dtype).itemsize
        # The pieces of a sum go to each host, and where sums are cut, so do those of the sum over the hosts.
        return nbytes * ((self.num_hosts - 1) + (self.num_cuts - 1))


class ExactExchange:
    """What one rank sends to its counterparts for one sum, what it receives, and what becomes of it.

    Sums are sent in the dtype in which they are added.

    Args:
        plan: The slices.
        numel: The elements of this rank's part of a slice.
        dtype: The dtype in which values are added.
        pool: Gives memory.

    Attributes:
        sums: By the number of a slice: where the sum of this rank's part of it over the ranks of the host is written.
        received: For each host, the memory for what its counterpart sends. This rank's host is among them.
    """

    def __init__(self, plan: SumPlan, numel: int, dtype: torch.dtype, pool: BufferPool[Work]) -> None:
        self._plan, self._pool = plan, pool
        self.sums = {index: pool.take(numel, dtype) for index in plan.hosts_of}
        own = plan.piece_for(plan.host, self.sums)
        hosts = range(len(plan.slices))
        self.received = [own if host == plan.host else pool.take(own.numel(), dtype) for host in hosts]
        self._addends = self.received

    def sent(self) -> list[torch.Tensor]:
        """Return what each host gets: pieces of the sums, which are complete."""
        return [self._plan.piece_for(host, self.sums) for host in range(len(self.received))]

    def second(self) -> tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]] | None:
        """Return what a second exchange sends and receives, by host; None if there is none. The first is done.

        This rank adds its own piece, and gets the others.
        """
        plan = self._plan
        if plan.num_cuts == 1:
            return None
        own, total = self.received[plan.host], self.sums[plan.index]
        sum_in_rank_order(own, self.received, accumulate=False)
        pieces = dict(zip(plan.hosts_of[plan.index], total.tensor_split(plan.num_cuts), strict=True))
        self._addends = [total]
        return dict.fromkeys(pieces, own), pieces

    def write(self, target: torch.Tensor, accumulate: bool) -> None:
        """Write this rank's part of the sum over all hosts to ``target`` (1-D), or add it. All exchanges are done.

        The hosts are added in order, and rounded once.
        """
        sum_in_rank_order(target, self._addends, accumulate)

    def close(self) -> None:
        """Give the memory back."""
        others = (tensor for host, tensor in enumerate(self.received) if host != self._plan.host)
        for tensor in (*self.sums.values(), *others):
            self._pool.put_back(tensor)


class PackedExchange:
    """See ``ExactExchange``. Sums are sent as packets, and every rank adds what the packets hold, its own among them.

    Args:
        plan: The slices.
        numel: The elements of this rank's part of a slice.
        pool: Gives memory.
        packing: Packs and adds.
        name: Names the sum, for the errors that ``packing`` keeps.
    """

    def __init__(self, plan: SumPlan, numel: int, pool: BufferPool[Work], packing: Packing, name: Hashable) -> None:
        self._plan, self._pool, self._packing, self._name = plan, pool, packing, name
        self._taken: list[torch.Tensor] = []
        self.sums = {index: pool.take(numel, torch.float32) for index in plan.hosts_of}
        self._own_numel = plan.piece_for(plan.host, self.sums).numel()
        size, num_hosts = packing.packet_bytes(self._own_numel), len(plan.slices)
        # The packets lie one after another, so that one kernel adds them.
        self._packets = self._take(num_hosts * size, torch.uint8)
        self.received = [self._packets[host * size : (host + 1) * size] for host in range(num_hosts)]
        # By host, the packets of the pieces of a sum that was cut.
        self._sums_of_cuts: dict[int, torch.Tensor] = {}

    def _take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._taken.append(self._pool.take(numel, dtype))
        return self._taken[-1]

    def sent(self) -> list[torch.Tensor]:
        """Pack each piece of the sums once, for one host or several."""
        plan, hosts = self._plan, range(len(self.received))
        packets = {plan.cut_for(plan.host): self.received[plan.host]}
        for host in hosts:
            if (cut := plan.cut_for(host)) not in packets:
                numel = plan.piece_for(host, self.sums).numel()
                packets[cut] = self._take(self._packing.packet_bytes(numel), torch.uint8)
        for cut, host in {plan.cut_for(host): host for host in hosts}.items():
            self._packing.pack(plan.piece_for(host, self.sums), packets[cut], error_of=(self._name, cut))
        # Only packets are kept while they are on their way.
        if plan.num_cuts == 1:
            self._give_sums_back()
        return [packets[plan.cut_for(host)] for host in hosts]

    def second(self) -> tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]] | None:
        """Add this rank's piece, pack the sum, and exchange it for the others."""
        plan, packing = self._plan, self._packing
        if plan.num_cuts == 1:
            return None
        own = self._take(self._own_numel, torch.float32)
        packing.add(own, self._packets, num_sources=len(self.received))
        pieces = zip(plan.hosts_of[plan.index], self.sums[plan.index].tensor_split(plan.num_cuts), strict=True)
        packets = {host: self._take(packing.packet_bytes(piece.numel()), torch.uint8) for host, piece in pieces}
        packing.pack(own, packets[plan.host])
        self._sums_of_cuts = packets
        return dict.fromkeys(packets, packets[plan.host]), packets

    def write(self, target: torch.Tensor, accumulate: bool) -> None:
        """Add what the packets hold, in the order of hosts."""
        plan, packing = self._plan, self._packing
        if plan.num_cuts == 1:
            packing.add(target, self._packets, num_sources=len(self.received), accumulate=accumulate)
            return
        total = self.sums[plan.index]
        for packet, piece in zip(self._sums_of_cuts.values(), total.tensor_split(plan.num_cuts), strict=True):
            packing.add(piece, packet)
        sum_in_rank_order(target, [total], accumulate)

    def _give_sums_back(self) -> None:
        for tensor in self.sums.values():
            self._pool.put_back(tensor)
        self.sums = {}

    def close(self) -> None:
        """Give the memory back."""
        self._give_sums_back()
        for tensor in self._taken:
            self._pool.put_back(tensor)


HostExchange = ExactExchange | PackedExchange
