"""Bytes of the memory between hosts whose ranks share memory. See ``comm.transports.two_level``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroengine import ops
from zeroengine.comm.host_layout import HostLayout
from zeroengine.comm.packing import is_quantizable
from zeroengine.comm.rank_order_sum import wide_dtype
from zeroengine.comm.transports.two_level_sum import SumPlan
from zeroengine.plan.unit_bytes import UnitBytes
from zeroengine.runtime.first_list_calls import ArrivalExchange


def two_level_bytes(
    units: Sequence[UnitBytes], world_size: int, ranks_per_host: int, gathered: int, bits: int | None
) -> int:
    """Return the most bytes of what came from other hosts, and of sums that are sent to them. ``Setting.adds_by_host``.

    Args:
        units: The units.
        world_size: The number of ranks.
        ranks_per_host: The ranks of each host.
        gathered: The most bytes of full buffers at a time.
        bits: The bits of an integer in packets of sums. None: sums travel exactly.
    """
    size, num_hosts = ranks_per_host, world_size // ranks_per_host
    again = after_update = 0
    sums: list[int] = []
    for unit in units:
        parameters, optimizer = unit.degrees.parameters, unit.degrees.optimizer
        # A rank receives the shards of the ranks of its own number on the other hosts that it gathers from.
        again = max(again, unit.full_bytes // parameters * (parameters // size - 1))
        # Unless another rank of this host needs them, they go where they belong.
        if parameters < size < optimizer:
            after_update += unit.full_bytes // optimizer * (optimizer // size - 1)
        if unit.gradients is not None:
            shape = _SumShape.of_unit(unit, size, num_hosts)
            packed = bits is not None and is_quantizable(unit.gradients.reduce_dtype)
            itemsize = wide_dtype(unit.gradients.reduce_dtype).itemsize
            sums.append(shape.packed_bytes(bits or 0) if packed else shape.numel * itemsize)
    # As many units pass through at a time as are gathered.
    largest = max((unit.full_bytes for unit in units if unit.degrees.parameters > size), default=0)
    passing = again * -(-gathered // largest) if largest else 0
    # Where a list of units is first called, the ranks exchange a packet.
    packets = ArrivalExchange.nbytes * (num_hosts - 1) if any(unit.degrees.parameters > 1 for unit in units) else 0
    # On a slow network the sums of all units are on their way when the backward ends.
    return passing + packets + after_update + sum(sums)


def packed_numel(unit: UnitBytes, world_size: int, ranks_per_host: int) -> int:
    """Return the elements of the sums of a unit that a rank packs for other hosts and its own, once a reduce."""
    shape = _SumShape.of_unit(unit, ranks_per_host, world_size // ranks_per_host)
    return shape.part * shape.num_slices


def sent_sum_bytes(unit: UnitBytes, world_size: int, ranks_per_host: int, bits: int | None) -> int:
    """Return the bytes that a rank sends to other hosts for the sum of a unit's gradients.

    Args:
        unit: The unit, which is trained.
        world_size: The number of ranks.
        ranks_per_host: The ranks of each host.
        bits: The bits of an integer in packets of sums. None: sums travel exactly.
    """
    assert unit.gradients is not None
    shape = _SumShape.of_unit(unit, ranks_per_host, world_size // ranks_per_host)
    packed = bits is not None and is_quantizable(unit.gradients.reduce_dtype)
    numel = shape.part // shape.num_cuts
    nbytes = ops.packet_bytes(numel, bits or 0) if packed else numel * wide_dtype(unit.gradients.reduce_dtype).itemsize
    return nbytes * shape.num_sent


@dataclass(frozen=True)
class _SumShape:
    """What one rank holds of a unit's sum. See ``comm.transports.two_level_sum.SumPlan``."""

    part: int  # the elements of this rank's part of a slice
    num_slices: int  # that the ranks of its number on all hosts have
    num_cuts: int
    num_hosts: int
    is_shared: bool  # whether other ranks of the host have the same slice

    @classmethod
    def of_unit(cls, unit: UnitBytes, size: int, num_hosts: int) -> _SumShape:
        assert unit.gradients is not None
        degree = unit.sum_degree
        plan = SumPlan.of_levels(HostLayout(0, num_hosts, size), unit.degrees.levels_to(degree))
        num_sharers = len(plan.sharers)
        part = unit.layout.numel // degree // num_sharers
        return cls(part, len(plan.hosts_of), plan.num_cuts, num_hosts, num_sharers > 1)

    @property
    def numel(self) -> int:
        """The elements of the sums within the host, of those that arrive, and of a sum that the host shares."""
        arriving = self.part // self.num_cuts * (self.num_hosts - 1)
        return self.part * self.num_slices + arriving + self.part * self.is_shared

    @property
    def num_sent(self) -> int:
        """The pieces of a sum that are sent to other hosts, and where sums are cut, those of the sum over the hosts."""
        return (self.num_hosts - 1) + (self.num_cuts - 1)

    def packed_bytes(self, bits: int) -> int:
        """Return the bytes of the sums within the host, of packets, and of a sum that the host shares."""
        exact = self.part * self.num_slices + self.part * self.is_shared
        # One packet more for each host that gets another piece, and after the exchange those of a sum's pieces.
        num_packets = self.num_hosts + self.num_slices * self.num_cuts
        if self.num_cuts > 1:
            exact += -(-self.part // self.num_cuts)
            num_packets += self.num_cuts
        packet = ops.packet_bytes(-(-self.part // self.num_cuts), bits)
        return exact * torch.float32.itemsize + num_packets * packet
