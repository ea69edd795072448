"""The flat layout of a unit and the degrees that it is partitioned at, for those who allocate and those who predict."""

from __future__ import annotations

import dataclasses

from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.layout import FlatLayout


def degrees_of_unit(plan: UnitPlan, degrees: Degrees, persistence_threshold: int) -> Degrees:
    """Return the degrees of one unit.

    The parameters of a small unit stay whole on every rank, because gathering them would cost more time than
    partitioning them saves memory.

    Args:
        plan: The unit.
        degrees: The degrees of the stage.
        persistence_threshold: Elements up to which a unit is small.
    """
    return dataclasses.replace(degrees, parameters=1, secondary=0) if plan.numel <= persistence_threshold else degrees


def layout_of_unit(plan: UnitPlan, degrees: Degrees, world_size: int, shard_align_bytes: int) -> FlatLayout:
    """Return where the parameters of a unit lie in its flat buffer.

    Args:
        plan: The unit.
        degrees: The degrees of the unit, or those of the stage; the offsets are the same.
        world_size: The number of ranks.
        shard_align_bytes: ``Transport.shard_align_bytes``.
    """
    shapes = ((name, tuple(param.shape)) for name, param in plan.params)
    align = max(shard_align_bytes // plan.dtype.itemsize, 1)
    return FlatLayout.build(plan.name, shapes, degrees, world_size, align)
