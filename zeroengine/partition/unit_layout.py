"""The flat layout of a unit and the degrees that it is partitioned at, for those who allocate and those who predict."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.degrees import Degrees, degrees_of, degrees_of_stage
from zeroengine.partition.layout import FlatLayout
from zeroengine.partition.slices import local_shape
from zeroengine.utils.formats import listed

# The number of units that an error names.
NUM_SHOWN = 8


class PartitionSettings(Protocol):
    """The part of the configuration that decides degrees: the section "zero_optimization" once it is resolved."""

    @property
    def stage(self) -> int | str:
        """The stage, or "auto"."""

    @property
    def degree_numbers(self) -> Mapping[str, int] | None:
        """The degrees, by the attributes of ``Degrees``; None: the stage decides."""

    @property
    def unit_degree_numbers(self) -> Sequence[tuple[str, Mapping[str, int]]]:
        """The same for units whose names match a pattern."""

    @property
    def param_persistence_threshold(self) -> int:
        """Elements up to which a unit is small."""


@dataclass(frozen=True)
class DegreeRules:
    """Decides the degrees of each unit of a model. All of them have the same levels.

    Attributes:
        default: The degrees of units that no pattern matches.
        by_pattern: The degrees of units whose names match a pattern. The first pattern that matches decides.
        persistence_threshold: Elements up to which a unit is small. The parameters of a small unit stay whole on every
            rank, because gathering them would cost more time than partitioning them saves memory.
        stage: The stage, by which experts are partitioned that are split over ranks.
    """

    default: Degrees
    by_pattern: tuple[tuple[str, Degrees], ...] = ()
    persistence_threshold: int = 0
    stage: int = 0

    def __post_init__(self) -> None:
        levels = {level for degrees in self.all_degrees for level in degrees.levels}
        shared = tuple(sorted(levels))
        object.__setattr__(self, "default", dataclasses.replace(self.default, levels=shared))
        by_pattern = tuple((name, dataclasses.replace(own, levels=shared)) for name, own in self.by_pattern)
        object.__setattr__(self, "by_pattern", by_pattern)

    @classmethod
    def of_settings(cls, settings: PartitionSettings, world_size: int) -> DegreeRules:
        """Return the rules of a configuration, in which "auto" as a stage counts as 0."""
        stage = settings.stage if isinstance(settings.stage, int) else 0
        by_pattern = tuple(
            (pattern, degrees_of(stage, numbers, world_size)) for pattern, numbers in settings.unit_degree_numbers
        )
        default = degrees_of(stage, settings.degree_numbers, world_size)
        return cls(default, by_pattern, settings.param_persistence_threshold, stage)

    @property
    def all_degrees(self) -> tuple[Degrees, ...]:
        """The degrees that units may have, apart from small ones."""
        return self.default, *(degrees for _, degrees in self.by_pattern)

    def of_unit(self, plan: UnitPlan) -> Degrees:
        """Return the degrees of one unit."""
        own = (degrees for pattern, degrees in self.by_pattern if _matches(plan, pattern))
        degrees = next(own, self.default)
        if plan.expert_ranks:
            degrees = degrees_of_stage(self.stage, plan.expert_ranks)
        is_small = plan.numel <= self.persistence_threshold
        return dataclasses.replace(degrees, parameters=1, secondary=0) if is_small else degrees

    def check_patterns(self, plans: Sequence[UnitPlan]) -> None:
        """Check that each pattern matches a unit.

        Raises:
            ZeroEngineError: One matches none. The message lists names of units.
        """
        for pattern, _ in self.by_pattern:
            if not any(_matches(plan, pattern) for plan in plans):
                raise ZeroEngineError(
                    f"zero_optimization.degrees.per_unit: the pattern {pattern!r} matches no unit. The units are "
                    f'{listed([plan.name for plan in plans], NUM_SHOWN)}; "units" in the configuration says which '
                    "modules are units."
                )


def _matches(plan: UnitPlan, pattern: str) -> bool:
    # Frozen parameters of a block, or those of another dtype, are a unit of their own, with a suffix in its name.
    return fnmatch.fnmatchcase(plan.name.partition(" (")[0], pattern)


def layout_of_unit(plan: UnitPlan, degrees: Degrees, world_size: int, shard_align_bytes: int) -> FlatLayout:
    """Return where the parameters of a unit lie in its flat buffer.

    Args:
        plan: The unit.
        degrees: The degrees of the unit.
        world_size: The number of ranks.
        shard_align_bytes: ``Transport.shard_align_bytes``.
    """
    shapes = ((name, local_shape(param)) for name, param in plan.params)
    align = math.lcm(max(shard_align_bytes // plan.dtype.itemsize, 1), plan.algorithm.block)
    num_ranks = plan.data_ranks(world_size)
    return FlatLayout.build(plan.name, shapes, degrees, num_ranks, align, plan.algorithm.block)
