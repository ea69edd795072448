"""The bytes of the copy in CPU memory that a checkpoint is written from while training goes on."""

from __future__ import annotations

from collections.abc import Sequence

from zeroengine.partition.boxes import boxes_of_run
from zeroengine.plan.optimizer_state import StateSizes
from zeroengine.plan.unit_bytes import UnitBytes
from zeroengine.utils.rounding import round_up

# Counted in bytes: a multiple of every dtype's size, as a view of another dtype requires.
COPY_ALIGNMENT = 64


def checkpoint_copy_bytes(units: Sequence[UnitBytes], world_size: int, sizes: Sequence[Sequence[StateSizes]]) -> int:
    """Return the bytes of rank 0's copy of masters, optimizer state and frozen parameters, without the model's buffers.

    Args:
        units: The units.
        world_size: The number of ranks, which share the work where they hold copies of one shard.
        sizes: For each unit and parameter, the optimizer's state; empty for a frozen unit.
    """
    nbytes = 0
    for unit, states in zip(units, sizes, strict=True):
        degree = unit.degrees.optimizer if states else unit.degrees.parameters
        dtype = unit.master_dtype if states else unit.plan.dtype
        for span in unit.layout.spans(0, degree, unit.layout.unreplicated_range(0, degree, world_size)):
            slot = unit.layout.slots[span.param_index]
            state = states[span.param_index] if states else StateSizes((), ())
            for box in boxes_of_run(slot.shape, span.param_offset, span.param_offset + span.numel):
                nbytes += sum(
                    round_up(box.numel * size, COPY_ALIGNMENT) for size in (dtype.itemsize, *state.element_sizes)
                )
            # The rank with a parameter's first element saves its step count.
            if span.param_offset == 0:
                nbytes += sum(round_up(size, COPY_ALIGNMENT) for size in state.number_sizes)
    return nbytes
