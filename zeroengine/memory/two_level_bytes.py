"""Bytes of the memory between hosts whose ranks share memory. See ``comm.transports.two_level``."""

from __future__ import annotations

from collections.abc import Sequence

from zeroengine.comm.host_layout import HostLayout
from zeroengine.comm.transports.two_level_sum import SumSizes
from zeroengine.memory.unit_bytes import UnitBytes


def two_level_bytes(
    units: Sequence[UnitBytes], world_size: int, ranks_per_host: int, gathered: int, bits: int | None
) -> int:
    """Return the most bytes of what came from other hosts, and of sums for them. See ``RankTopology.adds_by_host``.

    Args:
        units: The units.
        world_size: The number of ranks.
        ranks_per_host: The ranks of each host.
        gathered: The most bytes of full buffers at a time.
        bits: The bits of an integer in packets of sums. None: sums travel exactly.
    """
    size = ranks_per_host
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
            sums.append(_sum_sizes(unit, world_size, size).held_bytes(unit.gradients.reduce_dtype, bits))
    # As many units pass through at a time as are gathered.
    largest = max((unit.full_bytes for unit in units if unit.degrees.parameters > size), default=0)
    passing = again * -(-gathered // largest) if largest else 0
    # On a slow network the sums of all units are on their way when the backward ends.
    return passing + after_update + sum(sums)


def sent_sum_bytes(unit: UnitBytes, world_size: int, ranks_per_host: int, bits: int | None) -> int:
    """Return the bytes that a rank sends to other hosts for the sum of a unit's gradients.

    Args:
        unit: The unit, which is trained.
        world_size: The number of ranks.
        ranks_per_host: The ranks of each host.
        bits: The bits of an integer in packets of sums. None: sums travel exactly.
    """
    assert unit.gradients is not None
    return _sum_sizes(unit, world_size, ranks_per_host).sent_bytes(unit.gradients.reduce_dtype, bits)


def _sum_sizes(unit: UnitBytes, world_size: int, ranks_per_host: int) -> SumSizes:
    layout = HostLayout(0, world_size // ranks_per_host, ranks_per_host)
    return SumSizes.of_sum(layout, unit.degrees.levels_to(unit.sum_degree), unit.layout.numel)
