"""Write one checkpoint on one rank, beside training or within the call that saves."""

from __future__ import annotations

import threading
from collections import ChainMap
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroengine.checkpoint.dcp_save import save_files
from zeroengine.checkpoint.directory import CheckpointFolder
from zeroengine.checkpoint.failures import failure_reason
from zeroengine.checkpoint.manifest import FORMAT, Manifest
from zeroengine.checkpoint.snapshot import Snapshot
from zeroengine.utils.progress import Report, ignore_progress


class SaveThread(threading.Thread):
    """One save on one rank. `run` may be called directly, too.

    It has a process group of its own, because collectives of training go on in another thread meanwhile, and the ranks
    would otherwise mix the two up.

    Attributes:
        error: Why the save failed on any rank, once the thread has ended; None where it succeeded.
    """

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup,
        directory: CheckpointFolder,
        tag: str,
        writing: Path,
        snapshot: Snapshot,
        keep: int | None,
    ) -> None:
        # It is no daemon, so that the interpreter does not exit in the middle of a save.
        super().__init__(name="zeroengine-save", daemon=False)
        self._rank, self._group, self._keep = rank, group, keep
        self.directory, self.tag, self.writing, self.snapshot = directory, tag, writing, snapshot
        self.error: str | None = None

    def run(self, report: Report = ignore_progress) -> None:
        """Write this rank's files and, on rank 0, commit the checkpoint. A collective."""
        try:
            self.error = self._write(report)
        # A CheckpointException of DCP derives from BaseException. An error that escaped the thread would be lost.
        except BaseException as error:
            self.error = failure_reason(error)
            # Only rank 0 removes the directory, which all ranks share.
            if self._rank == 0:
                self.directory.abandon(self.writing)
        finally:
            # The snapshot refers to the engine's states or to a copy of them, and this object lives until the next
            # save.
            del self.snapshot

    def _write(self, report: Report) -> str | None:
        """Return why the save failed, or None, the same on all ranks."""
        snapshot = self.snapshot
        # A file that any rank failed to write is an error of all ranks.
        own_files = save_files(self.writing, snapshot.entries, snapshot.objects, snapshot.aliases, self._group, report)
        # This also ensures that every rank has closed and synced its files before rank 0 commits.
        all_files: list[Any] = [None] * self._group.size()
        dist.all_gather_object(all_files, own_files, group=self._group)
        reasons: list[str | None] = [None]
        if self._rank == 0:
            try:
                files = dict(ChainMap(*all_files))
                manifest = Manifest(format=FORMAT, tag=self.tag, files=files, **snapshot.about)
                self.directory.commit(self.writing, manifest, self._keep)
            # The other ranks wait in the broadcast below, so no error may leave this block.
            except Exception as error:
                reasons = [failure_reason(error)]
                self.directory.abandon(self.writing)
        # Only rank 0 knows the result of the commit. Every rank needs it to raise the same error.
        dist.broadcast_object_list(reasons, group_src=0, group=self._group)
        return reasons[0]
