"""A small transport, as ``CONTRIBUTING.md`` says to add one: every operation sends all memory to all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Buffer, Levels, Ranks, ResizableBuffer, Slices, Transport
from zeroengine.comm.rank_order_sum import sum_in_rank_order
from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.comm.transports import choose
from zeroengine.comm.watchdog import Watchdog
from zeroengine.partition.degrees import shard_index
from zeroengine.utils.process_groups import destroy_group
from zeroengine.utils.work import Completed, Work


class ToyChannel:
    """See ``interfaces.Channel``. Every operation is complete when it returns, and sums pass through kept memory."""

    def __init__(self, group: dist.ProcessGroup, watchdog: Watchdog) -> None:
        self._group, self._watchdog, self._rank, self._size = group, watchdog, group.rank(), group.size()
        self.memory: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def _send_to_all(self, sent: torch.Tensor, label: str) -> list[torch.Tensor]:
        """Return what each rank has sent."""
        numel, dtype = self._size * sent.numel(), sent.dtype
        arrived = self.memory.setdefault((numel, dtype), torch.empty(numel, dtype=dtype)).chunk(self._size)
        with self._watchdog.guard(label):
            dist.all_gather([piece.view(torch.uint8) for piece in arrived], sent.view(torch.uint8), group=self._group)
        return list(arrived)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, ranks: Ranks = None) -> Work:
        arrived = self._send_to_all(shard.clone(), label)
        for target, rank in zip(full.chunk(len(ranks or arrived)), ranks or range(self._size), strict=True):
            target.copy_(arrived[rank])
        return Completed()

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool = False, levels: Levels = None
    ) -> Work:
        index = self._rank if levels is None else shard_index(self._rank, levels)
        arrived = self._send_to_all(full, label)
        pieces = [values.chunk(full.numel() // shard.numel())[index] for values in arrived]
        sum_in_rank_order(shard, pieces, accumulate)
        return Completed()

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, label: str, slices: Slices) -> Work:
        ranks, levels, sizes = slices.ranks or tuple(range(self._size)), slices.levels, slices.sizes
        if sizes is not None:
            # Every rank sends as much as the one that sends most, because this toy sends equally much to all.
            most, own = max(map(sum, sizes)), ranks.index(self._rank)
            arrived = self._send_to_all(torch.cat([sent, sent.new_zeros(most - sent.numel())]), label)
            for rank, row, target in zip(ranks, sizes, received.split([row[own] for row in sizes]), strict=True):
                target.copy_(arrived[rank].split([*row, most - sum(row)])[own])
            return Completed()
        arrived = self._send_to_all(sent, label)
        targets = received.chunk(len(ranks))
        index = ranks.index(self._rank) if levels is None else shard_index(self._rank, levels)
        for target, rank in zip(targets, ranks, strict=True):
            target.copy_(arrived[rank].chunk(sent.numel() // target.numel())[index])
        return Completed()

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        sum_in_rank_order(full, self._send_to_all(full, label), accumulate=False)
        return Completed()

    def reusable(self, work: Work, timeout_s: float) -> bool:
        return True


class ToyTransport(TransportTraits):
    """See ``interfaces.Transport``."""

    packed_sums = None
    name = "toy"
    shard_align_bytes = 64

    @classmethod
    def staged_numel(cls, world_size: int, slice_numel: int, *, by_host: bool) -> int:
        """All slices of all ranks."""
        return world_size * world_size * slice_numel

    def __init__(self, group: dist.ProcessGroup, watchdog: Watchdog) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._group, self._watchdog = group, watchdog
        self.gather, self.reduce, self.exchange = (ToyChannel(group, watchdog) for _ in range(3))

    def empty(self, numel: int, dtype: torch.dtype, *, sent: bool = True) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool = False) -> Buffer:
        return ResizableBuffer(self.empty(numel, dtype))

    def staging_bytes(self) -> int:
        return sum(memory.nbytes for memory in self.reduce.memory.values() if memory.dtype is not torch.float64)

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        summed = values.clone()
        self.reduce.all_reduce(summed, label)
        return summed

    def close(self) -> None:
        self._watchdog.close()
        destroy_group(self._group)


def add_toy_transport(patch: pytest.MonkeyPatch) -> None:
    """List, choose and open the transport in ``transports.choose``, and nowhere else, until ``patch`` is undone."""

    def open_transport(group: Group, kind: str, timeout: float, register_buffers: bool) -> Transport:
        return ToyTransport(group.new_group(group.backend, timeout), group.start_watchdog(timeout))

    patch.setitem(choose.TRANSPORTS, ToyTransport.name, ToyTransport)
    patch.setattr(choose, "_between_cpus", lambda kind, hosts: ToyTransport)
    # The modules that open transports have imported the function.
    patch.setattr("zeroengine.engine.initialize.open_transport", open_transport)
