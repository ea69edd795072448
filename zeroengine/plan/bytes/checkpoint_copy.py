"""The bytes of the copy in CPU memory that a checkpoint is written from while training goes on."""

from __future__ import annotations

from collections.abc import Sequence

from zeroengine.config import Config
from zeroengine.plan.bytes.optimizer_state import StateSizes
from zeroengine.plan.bytes.outer_bytes import outer_element_sizes
from zeroengine.plan.bytes.unit_bytes import UnitBytes

# Counted in bytes: a multiple of every dtype's size, as a view of another dtype requires.
COPY_ALIGNMENT = 64
# A share of a shard cuts a parameter into few boxes (``partition.boxes``). Each begins at such a multiple.
MAX_BOXES = 9


def checkpoint_copy_bytes(
    units: Sequence[UnitBytes], config: Config, num_ranks: int, sizes: Sequence[Sequence[StateSizes]]
) -> int:
    """Return the most bytes of a rank's copy of masters, optimizer state and frozen parameters, without buffers.

    Args:
        units: The units.
        config: The resolved configuration.
        num_ranks: All ranks, those of other replicas of ``local_steps`` included. They share the work.
        sizes: For each unit and parameter, the optimizer's state; empty for a frozen unit.
    """
    nbytes = 0
    for unit, states in zip(units, sizes, strict=True):
        dtype = unit.master_dtype if states else unit.plan.dtype
        # The momentum of the outer step is saved, and the anchor is not.
        sizes_of_element = [dtype.itemsize, *outer_element_sizes(unit, config)[:1]]
        if states:
            sizes_of_element += max((state.element_sizes for state in states), key=sum)
        nbytes += -(-unit.layout.numel // num_ranks) * sum(sizes_of_element)
        nbytes += len(unit.plan.params) * (len(sizes_of_element) + 1) * MAX_BOXES * COPY_ALIGNMENT
    return nbytes
