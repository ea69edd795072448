"""Bytes that are transient, beside the states and the buffers: at ``initialize`` and in a backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.memory.gradient_buffer_bytes import MAX_IN_FLIGHT
from zeroengine.memory.unit_bytes import UnitBytes, value_bytes
from zeroengine.partition.slices import is_split, whole_shape


def most_at_start(units: Sequence[UnitBytes], device: str) -> int:
    """Return the most bytes on a kind of device while the model's values are moved into units, one unit at a time."""
    remaining = sum(value_bytes(unit.plan, device) for unit in units)
    moved = most = 0
    for unit in units:
        shard = 0 if unit.shard_offloaded else unit.shard_bytes
        full = unit.full_bytes if unit.is_releasable else 0
        wide = unit.layout.numel * torch.float32.itemsize if unit.has_wide_values else 0
        master = unit.optimizer_numel * torch.float32.itemsize
        master *= unit.has_wide_values and not unit.states_offloaded
        # A parameter without values is whole before it is cut, and twice where its dtype is not that of the unit.
        without_values = [param for _, param in unit.plan.params if param.is_meta and is_split(param)]
        largest_whole = max((_whole_bytes(param, unit.plan.dtype) for param in without_values), default=0)
        most = max(most, remaining + moved + shard + full + wide + master + largest_whole)
        moved += shard + master
        remaining -= value_bytes(unit.plan, device)
    return most


def _whole_bytes(param: torch.Tensor, dtype: torch.dtype) -> int:
    return math.prod(whole_shape(param)) * (dtype.itemsize + param.element_size() * (param.dtype is not dtype))


def receive_bytes(
    units: Sequence[UnitBytes], world_size: int, transport: type[TransportTraits], *, accumulates: bool
) -> int:
    """Return the bytes of the memory that a transport receives sums into, as far as it is not the gradients' own.

    Args:
        units: The units.
        world_size: The number of ranks.
        transport: The class of the transport.
        accumulates: Whether sums of several micro-steps are added up.
    """
    if transport.sums_in_place:
        return 0
    sharded = [(unit, unit.gradients) for unit in units if unit.gradients is not None and unit.degrees.gradients > 1]
    sizes = [
        gradients.reduce_dtype.itemsize * unit.layout.numel // world_size
        for unit, gradients in sharded
        if accumulates or gradients.dtype is not gradients.reduce_dtype
    ]
    return sum(sorted(sizes)[-MAX_IN_FLIGHT:])
