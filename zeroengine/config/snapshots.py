"""Copies of the states in the memory of hosts."""

from __future__ import annotations

from typing import Annotated

from zeroengine.config.fields import AUTO, MAX_COUNT, AboveZero, Between, Folder, Section


class Snapshots(Section):
    """Snapshots of the states in the memory of this host and of others, for ranks that are started again."""

    every_seconds: Annotated[AboveZero | None, AUTO] = None
    """Seconds between two snapshots, which are taken beside training. null: none are taken."""
    copies: Annotated[Annotated[int, Between(0, MAX_COUNT)] | None, AUTO] = None
    """Number of other hosts that keep a copy of each rank's part. null: one, or none where all ranks are on one
    host."""
    folder: Annotated[Folder | None, AUTO] = None
    """Folder of each host in a file system in memory. null: that of zero-launch, in /dev/shm, which it removes when the
    run ends."""
