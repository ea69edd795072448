"""The bytes of the copy in CPU memory that a checkpoint is written from while training goes on."""

from __future__ import annotations

from collections.abc import Sequence

from zeroengine.config import Config
from zeroengine.memory.optimizer_bytes import UnitState
from zeroengine.memory.outer_bytes import outer_element_sizes
from zeroengine.memory.unit_bytes import UnitBytes, average_bytes

# Counted in bytes: a multiple of every dtype's size, as a view of another dtype requires.
COPY_ALIGNMENT = 64
# A share of a shard cuts a parameter into few boxes (``partition.boxes``). Each begins at such a multiple.
MAX_BOXES = 9


def checkpoint_copy_bytes(
    units: Sequence[UnitBytes], config: Config, world_size: int, num_replicas: int, states: Sequence[UnitState]
) -> int:
    """Return the most bytes of a rank's copy of masters, optimizer state, averages and frozen parameters, not buffers.

    Args:
        units: The units.
        config: The resolved configuration.
        world_size: The ranks that the states are partitioned over.
        num_replicas: How many such sets of ranks there are, which share the work, unless they have other slices.
        states: The optimizer's state of each unit.
    """
    nbytes = 0
    for unit, state in zip(units, states, strict=True):
        dtype = unit.master_dtype if unit.optimizer_numel else unit.plan.dtype
        # The momentum of the outer step is saved, and the anchor is not.
        sizes_of_element = [dtype.itemsize, *outer_element_sizes(unit, config)[:1]]
        if unit.optimizer_numel and config.ema is not None:
            sizes_of_element.append(average_bytes(config))
        num_ranks = unit.plan.data_ranks(world_size) * (1 if unit.plan.is_split else num_replicas)
        numel, algorithm = -(-unit.layout.numel // num_ranks), unit.plan.algorithm
        boxes = len(sizes_of_element) + 1
        if state.is_whole:
            # Owners save the state of their parameters.
            nbytes += state.nbytes
        elif unit.optimizer_numel and algorithm.block > 1:
            moments = algorithm.moment_bytes(numel)
            nbytes, boxes = nbytes + sum(moments), boxes + len(moments)
        else:
            sizes_of_element += state.element_sizes
            boxes += len(state.element_sizes)
        nbytes += numel * sum(sizes_of_element)
        nbytes += len(unit.plan.params) * boxes * MAX_BOXES * COPY_ALIGNMENT
    return nbytes
