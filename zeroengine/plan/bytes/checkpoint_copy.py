"""The bytes of the copy in CPU memory that a checkpoint is written from while training goes on."""

from __future__ import annotations

from collections.abc import Sequence

from zeroengine.config import Config
from zeroengine.partition.boxes import boxes_of_run
from zeroengine.partition.replicas import ReplicaLayout
from zeroengine.plan.bytes.optimizer_state import StateSizes
from zeroengine.plan.bytes.outer_bytes import outer_element_sizes
from zeroengine.plan.bytes.unit_bytes import UnitBytes
from zeroengine.utils.rounding import round_up

# Counted in bytes: a multiple of every dtype's size, as a view of another dtype requires.
COPY_ALIGNMENT = 64


def checkpoint_copy_bytes(
    units: Sequence[UnitBytes],
    config: Config,
    world_size: int,
    num_replicas: int,
    sizes: Sequence[Sequence[StateSizes]],
) -> int:
    """Return the bytes of rank 0's copy of masters, optimizer state and frozen parameters, without the model's buffers.

    Args:
        units: The units.
        config: The resolved configuration.
        world_size: The ranks that hold the states once, which share the work where they hold copies of one shard.
        num_replicas: The number of replicas of ``local_steps``, which share it as well.
        sizes: For each unit and parameter, the optimizer's state; empty for a frozen unit.
    """
    nbytes = 0
    layout = ReplicaLayout(0, num_replicas, world_size)
    for unit, states in zip(units, sizes, strict=True):
        degree = unit.degrees.optimizer if states else unit.degrees.parameters
        dtype = unit.master_dtype if states else unit.plan.dtype
        momentum = outer_element_sizes(unit, config)[:1]
        own_range = layout.share(*unit.layout.unreplicated_range(0, degree, world_size))
        for span in unit.layout.spans(0, degree, own_range):
            slot = unit.layout.slots[span.param_index]
            state = states[span.param_index] if states else StateSizes((), ())
            for box in boxes_of_run(slot.shape, span.param_offset, span.param_offset + span.numel):
                nbytes += sum(
                    round_up(box.numel * size, COPY_ALIGNMENT)
                    for size in (dtype.itemsize, *state.element_sizes, *momentum)
                )
            # The rank with a parameter's first element saves its step count.
            if span.param_offset == 0:
                nbytes += sum(round_up(size, COPY_ALIGNMENT) for size in state.number_sizes)
    return nbytes
