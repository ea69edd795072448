"""Which ranks hold the states of the model once, where replicas of it train apart (``local_steps``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaLayout:
    """Replicas of equally many consecutive ranks. Ordinary training is one replica of all ranks.

    Each replica partitions the states over its own ranks. Ranks of the same number within their replicas hold the same
    elements; they are *counterparts*. With 8 ranks and replicas of 4:

        replica         0            1
        ranks           0 1 2 3      4 5 6 7       the counterparts of rank 5 are ranks 1 and 5

    Attributes:
        rank: This rank.
        num_replicas: The number of replicas.
        ranks_per_replica: The ranks of each.
    """

    rank: int
    num_replicas: int
    ranks_per_replica: int

    @property
    def replica(self) -> int:
        """The number of this rank's replica."""
        return self.rank // self.ranks_per_replica

    @property
    def local_rank(self) -> int:
        """This rank's number within its replica."""
        return self.rank % self.ranks_per_replica

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this rank's replica."""
        first = self.replica * self.ranks_per_replica
        return tuple(range(first, first + self.ranks_per_replica))

    @property
    def counterparts(self) -> tuple[int, ...]:
        """The rank of each replica that has this rank's number within it, this one among them."""
        return tuple(range(self.local_rank, self.num_replicas * self.ranks_per_replica, self.ranks_per_replica))

    def share(self, start: int, stop: int) -> tuple[int, int]:
        """Return the part of the range [start, stop) that this rank works on where its counterparts take the rest."""
        bounds = [start + (stop - start) * number // self.num_replicas for number in (self.replica, self.replica + 1)]
        return bounds[0], bounds[1]
