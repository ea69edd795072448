"""How ranks lie on hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zeroengine.partition.degrees import Degrees


@dataclass(frozen=True)
class HostLayout:
    """Hosts with equally many consecutive ranks.

    Attributes:
        rank: This rank.
        num_hosts: The number of hosts.
        ranks_per_host: The ranks of each.
    """

    rank: int
    num_hosts: int
    ranks_per_host: int

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.num_hosts * self.ranks_per_host

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return self.rank // self.ranks_per_host

    @property
    def local(self) -> int:
        """This rank's number within its host."""
        return self.rank % self.ranks_per_host

    @property
    def counterparts(self) -> list[int]:
        """The rank of each host that has this rank's number within it, this one among them."""
        return list(range(self.local, self.world_size, self.ranks_per_host))

    def ranks_by_host(self) -> list[list[int]]:
        """Return the ranks of each host."""
        size = self.ranks_per_host
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def unfit(self, degrees: Iterable[Degrees]) -> list[int]:
        """Return the sizes, ascending, of groups of operations of these degrees that lie differently on the hosts."""
        sizes = {size for d in degrees for size in (d.optimizer, d.gradients, d.parameters, d.secondary, *d.levels)}
        return sorted(size for size in sizes - {0} if self.ranks_per_host % size and size % self.ranks_per_host)


def layout_of(hosts: Sequence[Sequence[int]], rank: int) -> HostLayout | None:
    """Return the layout of several hosts with equally many consecutive ranks, at least two; None for any other."""
    size = len(hosts[0])
    if len(hosts) == 1 or size == 1 or hosts != HostLayout(rank, len(hosts), size).ranks_by_host():
        return None
    return HostLayout(rank, len(hosts), size)
