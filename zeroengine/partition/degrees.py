"""The one table behind ZeRO's stages: a stage is three degrees of partitioning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from zeroengine.errors import ZeroEngineError


@dataclass(frozen=True)
class Degrees:
    """The number of ranks that each state of a unit is partitioned over.

    ``optimizer >= gradients >= parameters``. Each divides the degree before it, and ``optimizer`` divides the number of
    ranks. Degrees between 1 and the number of ranks are hybrid sharding (HSDP) and MiCS (arXiv 2205.00119).

    Ranks r // d of one value hold the whole state once. Shards are numbered so that they nest: a rank's optimizer
    shard lies inside its gradient shard, which lies inside its parameter shard. With 8 ranks and degrees (8, 8, 4), in
    eighths of the flat buffer:

        rank        0    1    2    3    4    5    6    7
        parameters  01   23   45   67   01   23   45   67
        optimizer   0    2    4    6    1    3    5    7

    Attributes:
        levels: The degrees that number the shards, ascending, each of which divides the next. All units of a model have
            the same levels, so that a rank owns the same part of every unit, whatever the unit's degrees. The degrees
            are among them, or 1. Empty: the unit's own degrees.
        secondary: The number of consecutive ranks over which a second copy of the parameters is partitioned, from which
            they are gathered again after their first use in a step (hpZ of ZeRO++, arXiv 2306.10209). It divides
            ``parameters``. 0: there is no second copy.
    """

    optimizer: int
    gradients: int
    parameters: int
    levels: tuple[int, ...] = ()
    secondary: int = 0

    def __post_init__(self) -> None:
        chain = (self.parameters, self.gradients, self.optimizer)
        if chain[0] < 1:
            raise ZeroEngineError(f"partition degrees must be at least 1, found {self}")
        for small, large in pairwise(chain):
            if small > large or large % small:
                raise ZeroEngineError(
                    f"partition degrees must nest (parameters | gradients | optimizer, each divides the next): {self}"
                )
        if not self.levels:
            object.__setattr__(self, "levels", tuple(sorted({*chain} - {1})))

    def __str__(self) -> str:
        return f"Degrees(optimizer={self.optimizer}, gradients={self.gradients}, parameters={self.parameters})"

    def levels_to(self, degree: int) -> tuple[int, ...]:
        """Return the levels that number the shards of ``degree``, which is 1 or one of the levels."""
        if degree > 1 and degree not in self.levels:
            raise AssertionError(f"{degree} is not a degree of {self}")
        return tuple(level for level in self.levels if level <= degree)

    def index(self, rank: int, degree: int) -> int:
        """Return the number of the shard that ``rank`` owns at ``degree``, which is 1 or one of the levels."""
        return shard_index(rank, self.levels_to(degree))

    def piece(self, rank: int, world_size: int) -> int:
        """Return the number of the part of every unit that ``rank`` alone counts, where ranks have copies."""
        return shard_index(rank, (*self.levels, world_size))

    def gather_groups(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks with which ``rank`` gathers: at first, again, after an update, and whole matrices."""
        again = self.secondary_owners(rank) if self.secondary else ()
        updated = self.owners(rank, self.optimizer, self.parameters)
        return self.owners(rank, self.parameters), again, updated, self.owners(rank, self.optimizer)

    def secondary_owners(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the second copy of the parameters with ``rank``, in the order of its shards."""
        first = rank // self.secondary * self.secondary
        return tuple(range(first, first + self.secondary))

    def reduce_groups(self, rank: int, world_size: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks with which ``rank`` reduces gradients, level by level, and then over all copies."""
        groups = []
        for degree in (self.gradients, self.optimizer):
            levels = (1, *self.levels_to(degree))
            groups += [ranks_of_level(rank, below, level) for below, level in pairwise(levels)]
            groups.append(ranks_of_level(rank, levels[-1], world_size))
        return tuple(groups)

    def numbers_in_order_of_ranks(self, world_size: int) -> bool:
        """Return whether the number of each rank's part is the rank itself, as it is at every stage."""
        return all(level == world_size for level in self.levels)

    def owners(self, rank: int, degree: int, within: int = 1) -> tuple[int, ...]:
        """Return the ranks whose shards at ``degree`` are, one after another, the shard of ``rank`` at ``within``."""
        return _owners(rank, self.levels_to(degree), self.levels_to(within), degree)


def ranks_of_level(rank: int, below: int, level: int) -> tuple[int, ...]:
    """Return the ranks, ascending, whose shards at ``level`` cut the shard that ``rank`` has at ``below``."""
    first = rank // level * level + rank % below
    return tuple(range(first, rank // level * level + level, below))


# There are as many units as blocks of a model, but few degrees, so what takes a walk over the ranks is kept.
@cache
def _owners(rank: int, levels: tuple[int, ...], levels_within: tuple[int, ...], degree: int) -> tuple[int, ...]:
    """Return what ``Degrees.owners`` does, for degrees that these levels number the shards of."""
    first = rank // degree * degree
    own = shard_index(rank, levels_within)
    ranks = [other for other in range(first, first + degree) if shard_index(other, levels_within) == own]
    return tuple(sorted(ranks, key=lambda other: shard_index(other, levels)))


@cache
def shard_index(rank: int, levels: tuple[int, ...]) -> int:
    """Return the number of the shard of ``rank`` at the last of ``levels``, each of which divides the next."""
    # Each level cuts the shards of the level below, so the number is refined level by level.
    index, below = 0, 1
    for level in levels:
        index = index * (level // below) + (rank % level) // below
        below = level
    return index


# ZeRO, section 5 (arXiv 1910.02054): which states are partitioned over all ranks.
#             stage: (optimizer, gradients, parameters)
STAGES = {
    0: (False, False, False),
    1: (True, False, False),
    2: (True, True, False),
    3: (True, True, True),
}


def degrees_of(stage: int, numbers: Mapping[str, int] | None, world_size: int) -> Degrees:
    """Return the degrees with these numbers, by the name of the attribute; None: those of the stage."""
    return (
        degrees_of_stage(stage, world_size)
        if numbers is None
        else Degrees(numbers["optimizer"], numbers["gradients"], numbers["parameters"], secondary=numbers["secondary"])
    )


def degrees_of_stage(stage: int, world_size: int) -> Degrees:
    """Return the degrees of ZeRO ``stage`` over ``world_size`` data-parallel ranks."""
    if stage not in STAGES:
        raise ZeroEngineError(f"zero_optimization.stage is one of {sorted(STAGES)}, found {stage!r}")
    optimizer, gradients, parameters = (world_size if partitioned else 1 for partitioned in STAGES[stage])
    return Degrees(optimizer, gradients, parameters)
