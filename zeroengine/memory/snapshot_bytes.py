"""The memory and the network that snapshots in the memory of hosts take."""

from __future__ import annotations

from zeroengine.config import Config

# The snapshot that is whole, and the one that is being taken.
GENERATIONS = 2


def copies_of(config: Config, num_hosts: int) -> int:
    """Return how many other hosts are to keep a copy of each rank's part."""
    copies = config.snapshots.copies
    return min(1, num_hosts - 1) if copies is None else copies


def snapshot_memory_bytes(nbytes: int, copies: int) -> int:
    """Return the bytes of memory of hosts that one rank's part takes: the copy of the states, and its files.

    Args:
        nbytes: The bytes of the rank's part of a snapshot, which each snapshot sends to as many other hosts.
        copies: The number of other hosts that keep a copy.
    """
    return nbytes * (1 + GENERATIONS * (1 + copies))
