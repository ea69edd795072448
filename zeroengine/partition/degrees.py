"""The one table behind ZeRO's stages: a stage is three degrees of partitioning."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from zeroengine.errors import ZeroEngineError


@dataclass(frozen=True)
class Degrees:
    """The number of ranks that each state of a unit is partitioned over.

    ``optimizer >= gradients >= parameters``. Each divides the degree before it, and ``optimizer`` divides the number of
    ranks.

    Each degree is 1 or the world size today. ``index`` already nests shards for degrees in between, which hybrid
    sharding (HSDP) and MiCS have, but collectives over subgroups of ranks do not exist.

    Shards are numbered so that they nest: a rank's optimizer shard lies inside its gradient shard, which lies inside
    its parameter shard. With 8 ranks and degrees (8, 8, 4), in eighths of the flat buffer:

        rank        0    1    2    3    4    5    6    7
        parameters  01   23   45   67   01   23   45   67
        optimizer   0    2    4    6    1    3    5    7
    """

    optimizer: int
    gradients: int
    parameters: int

    def __post_init__(self) -> None:
        chain = (self.parameters, self.gradients, self.optimizer)
        if chain[0] < 1:
            raise ZeroEngineError(f"partition degrees must be at least 1, found {self}")
        for small, large in pairwise(chain):
            if small > large or large % small:
                raise ZeroEngineError(
                    f"partition degrees must nest (parameters | gradients | optimizer, each divides the next): {self}"
                )

    def index(self, rank: int, degree: int) -> int:
        """Return the number of the shard that ``rank`` owns at ``degree``, which is one of the three degrees."""
        # Each larger degree cuts the shards of the smaller degree, so the index is refined level by level.
        index, below = 0, 1
        for d in (self.parameters, self.gradients, self.optimizer):
            index = index * (d // below) + (rank % d) // below
            if d == degree:
                return index
            below = d
        raise AssertionError(f"{degree} is not a degree of {self}")


# ZeRO, section 5 (arXiv 1910.02054): which states are partitioned over all ranks.
#             stage: (optimizer, gradients, parameters)
STAGES = {
    0: (False, False, False),
    1: (True, False, False),
    2: (True, True, False),
    3: (True, True, True),
}


def degrees_of_stage(stage: int, world_size: int) -> Degrees:
    """Return the degrees of ZeRO ``stage`` over ``world_size`` data-parallel ranks."""
    if stage not in STAGES:
        raise ZeroEngineError(f"zero_optimization.stage is one of {sorted(STAGES)}, found {stage!r}")
    optimizer, gradients, parameters = (world_size if partitioned else 1 for partitioned in STAGES[stage])
    return Degrees(optimizer, gradients, parameters)
