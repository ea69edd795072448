"""Bytes of the memory between hosts whose ranks share memory. See ``comm.transports.two_level``."""

from __future__ import annotations

from collections.abc import Sequence

from zeroengine.comm.rank_order_sum import wide_dtype
from zeroengine.plan.unit_bytes import UnitBytes


def two_level_bytes(units: Sequence[UnitBytes], world_size: int, ranks_per_host: int, gathered: int) -> int:
    """Return the most bytes of what came from other hosts, and of sums that are sent to them.

    Args:
        units: The units.
        world_size: The number of ranks.
        ranks_per_host: The ranks of each host.
        gathered: The most bytes of full buffers at a time.
    """
    size, num_hosts = ranks_per_host, world_size // ranks_per_host
    degrees = {d for unit in units for d in (unit.degrees.parameters, unit.degrees.gradients, unit.degrees.optimizer)}
    # With other degrees all operations go directly between ranks, over Gloo.
    if num_hosts == 1 or any(size % degree and degree % size for degree in degrees):
        return 0
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
            itemsize = wide_dtype(unit.gradients.reduce_dtype).itemsize
            sums.append(_sum_numel(unit, size, num_hosts) * itemsize)
    # As many units pass through at a time as are gathered.
    largest = max((unit.full_bytes for unit in units if unit.degrees.parameters > size), default=0)
    passing = again * -(-gathered // largest) if largest else 0
    # On a slow network the sums of all units are on their way when the backward ends.
    return passing + after_update + sum(sums)


def _sum_numel(unit: UnitBytes, size: int, num_hosts: int) -> int:
    """Return the elements of the sums within the host, of those that arrive, and of a sum that the host shares."""
    assert unit.gradients is not None
    # At gradient degree 1 the sum goes to the shards of the optimizer.
    degree = unit.degrees.gradients if unit.degrees.gradients > 1 else unit.degrees.optimizer
    num_sharers = max(1, size // degree)
    num_slices = max(1, degree // size)
    num_cuts = num_hosts // num_slices if num_hosts // num_slices > 2 else 1
    part = unit.layout.numel // degree // num_sharers
    return part * num_slices + part // num_cuts * (num_hosts - 1) + (part if num_sharers > 1 else 0)
