"""Bytes that exist in passing, beside the states and the buffers: at ``initialize`` and in a backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroengine.plan.gradient_buffer_bytes import MAX_IN_FLIGHT
from zeroengine.plan.unit_bytes import UnitBytes, value_bytes


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
        most = max(most, remaining + moved + shard + full + wide + master)
        moved += shard + master
        remaining -= value_bytes(unit.plan, device)
    return most


def receive_bytes(units: Sequence[UnitBytes], world_size: int, transport: str, *, accumulates: bool) -> int:
    """Return the bytes of the memory that NCCL receives sums into, as far as it is not the gradients' own.

    Args:
        units: The units.
        world_size: The number of ranks.
        transport: The name of the transport.
        accumulates: Whether sums of several micro-steps are added up.
    """
    sizes: list[int] = []
    for unit in units:
        if unit.gradients is None or world_size == 1 or transport != "nccl":
            continue
        casts = unit.gradients.dtype is not unit.gradients.reduce_dtype
        # NCCL neither adds to its target nor casts, so its sum has memory of its own first.
        if unit.degrees.gradients > 1 and (accumulates or casts):
            sizes.append(unit.gradients.reduce_dtype.itemsize * unit.layout.numel // world_size)
    return sum(sorted(sizes)[-MAX_IN_FLIGHT:])
