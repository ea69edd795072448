"""Choose between the newest snapshot in memory and the newest checkpoint on the disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zeroengine.checkpoint.content import CheckpointContent
from zeroengine.checkpoint.dcp_metadata import OpenFile
from zeroengine.checkpoint.directory import LATEST
from zeroengine.checkpoint.inspect import find_checkpoint
from zeroengine.checkpoint.manifest import MANIFEST, Manifest
from zeroengine.errors import CheckpointError
from zeroengine.utils.formats import counted


@dataclass(frozen=True)
class FoundSnapshot:
    """A snapshot in memory that is whole over the hosts that are left.

    Attributes:
        path: Its directory, which need not exist on this host.
        manifest: Its manifest.
        num_hosts: The number of hosts that have part of it.
        open_file: Opens one of its files, on this host or on another one that has it.
    """

    path: Path
    manifest: Manifest
    num_hosts: int
    open_file: OpenFile


@dataclass(frozen=True)
class SnapshotSearch:
    """What was found in the memory of the hosts.

    Attributes:
        found: The newest snapshot that is whole; None where there is none.
        damage: What is wrong with it and with newer ones, a sentence each.
        reached: The largest step that any host has reached.
    """

    found: FoundSnapshot | None
    damage: Sequence[str]
    reached: int


class SnapshotStore(Protocol):
    """Takes snapshots of the states in memory and finds them. ``recovery.snapshots`` has the class.

    Attributes:
        unused: The tag of a snapshot of an earlier round, as long as nothing was loaded.
    """

    unused: str | None

    @property
    def copy_bytes(self) -> int:
        """Return the bytes of CPU memory of the copy that snapshots are written from."""

    def end_step(self, step: int) -> bool:
        """Return whether a snapshot is to be taken now. Call it on every rank at the end of each step."""

    def take(self, content: CheckpointContent) -> None:
        """Copy the states, and keep them in memory beside training. A collective."""

    def find(self) -> SnapshotSearch:
        """Look for the newest snapshot that is whole. A collective."""


def newest_on_disk(path: Path) -> tuple[bool, Manifest | None, str]:
    """Return whether a folder has checkpoints, the manifest of the newest, and else why it has none."""
    try:
        return True, find_checkpoint(path, None)[1], "plain PyTorch wrote it"
    except CheckpointError as error:
        # A file that names a damaged checkpoint shows that there was one, and so does a manifest that is damaged.
        return os.path.lexists(path / LATEST) or any(path.glob(f"[!.]*/{MANIFEST}")), None, str(error)


@dataclass(frozen=True)
class NewestStates:
    """The newest states that a run may go on from. The same on all ranks.

    Attributes:
        folder: The folder of checkpoints; None where the user named none.
        has_checkpoint: Whether it has any.
        manifest: The manifest of the newest checkpoint; None where it has none or cannot be loaded.
        problem: Why there is no manifest.
        search: What was found in memory; None where no snapshots are taken.
    """

    folder: str | None
    has_checkpoint: bool
    manifest: Manifest | None
    problem: str
    search: SnapshotSearch | None

    @property
    def has_any(self) -> bool:
        """Whether there is anything to go on from."""
        return self.has_checkpoint or self.snapshot is not None

    @property
    def snapshot(self) -> FoundSnapshot | None:
        """The snapshot, if it is the newest; None if the checkpoint is."""
        found = None if self.search is None else self.search.found
        if found is None or self.manifest is None:
            return found
        # Both were taken at a time of rank 0, in whole seconds. Within one second the steps decide.
        snapshot, checkpoint = ((m.saved_at, m.step) for m in (found.manifest, self.manifest))
        return found if snapshot >= checkpoint else None

    def facts(self, step: int) -> dict[str, Any]:
        """Return what an event says of a resumed run beside its text."""
        assert self.search is not None
        return {
            "source": "snapshot" if self.snapshot is not None else "checkpoint",
            "hosts": 0 if self.snapshot is None else self.snapshot.num_hosts,
            "lost_steps": max(self.search.reached - step, 0),
        }

    def describe(self, step: int) -> str:
        """Return in one line what the run goes on from, at `step`, and what it has lost."""
        assert self.search is not None
        facts, found, folder = self.facts(step), self.search.found, self.folder
        if self.snapshot is not None:
            source = f"the snapshot of step {step} in the memory of {counted(facts['hosts'], 'host')}"
            newest = f"is of step {self.manifest.step}" if self.manifest else f"cannot be loaded ({self.problem})"
            other = f"the newest checkpoint in {folder} {newest}" if self.has_checkpoint else "there is no checkpoint"
        else:
            source = f"the checkpoint of step {step} in {folder}"
            other = f"no snapshot {'in memory is whole' if found is None else 'is newer'}"
        lost = "1 step was lost" if facts["lost_steps"] == 1 else f"{facts['lost_steps']} steps were lost"
        return f"resumed from {source}; {lost}; {other}"
