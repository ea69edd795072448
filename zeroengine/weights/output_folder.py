"""The folder that weights are written to, which appears as a whole, and the names of dtypes. Needs no torch."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path

from zeroengine.checkpoint.directory import sync_path
from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.checkpoint.folder_lock import try_lock
from zeroengine.errors import CheckpointError
from zeroengine.utils.files import checked_path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_dtype(name: object) -> str | None:
    """Return torch's name for a dtype: "bfloat16" for `bf16`, `bfloat16` or `torch.bfloat16`; None for None.

    Raises:
        CheckpointError: Weights are not written in it.
    """
    if name is None:
        return None
    dtype = DTYPES.get(str(name), str(name).removeprefix("torch."))
    if dtype not in DTYPES.values():
        raise CheckpointError(f"dtype {name}: write {', '.join(DTYPES)}, or leave it out to keep each tensor's own")
    return dtype


class OutputFolder:
    """A folder that is to appear as a whole, written by one process or several.

    Where the folder exists already its weights are replaced, and everything else in it stays.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Links are resolved, so that the rename replaces the folder itself and not a link to it.
        self.path = Path(os.path.realpath(checked_path(path, "the folder for the weights", CheckpointError)))
        self.writing = self.path.with_name(f".{self.path.name}.writing")
        self._replaced = self.path.with_name(f".{self.path.name}.replaced")
        self._lock: int | None = None

    def check(self, *, force: bool, apart_from: Path | None = None) -> None:
        """Check that the folder can be written.

        Args:
            force: Replace the weights in it.
            apart_from: A directory that must be neither within it nor around it.

        Raises:
            CheckpointError: It cannot be written, or exists already and is not to be replaced.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file: weights are written to a folder")
        # A mount point cannot be renamed.
        if os.path.ismount(self.path):
            raise CheckpointError(f"{self.path} is a mount point: name a folder in it")
        if apart_from is not None:
            # Replacing a folder around the checkpoint would move the checkpoint away while it is read.
            other = Path(os.path.realpath(apart_from))
            if self.path == other or self.path in other.parents or other in self.path.parents:
                raise CheckpointError(
                    f"{self.path} and the checkpoint {other} are one in the other: name a folder apart"
                )
        if not force and self.path.is_dir() and any(self.path.iterdir()):
            raise CheckpointError(
                f"{self.path} is there already: name another folder, or replace its weights with --force"
            )

    def begin(self, nbytes: int) -> Path:
        """Return the new folder to write into, which this process has locked.

        Raises:
            CheckpointError: Another process is writing it, or the disk has fewer than `nbytes` bytes free.
        """
        with as_checkpoint_errors(f"{self.path} cannot be written"):
            self.writing.mkdir(parents=True, exist_ok=True)
            # The lock is on the directory itself, so it needs no file, and it ends with the process.
            self._lock = os.open(self.writing, os.O_RDONLY)
        if not try_lock(self._lock, fcntl.LOCK_EX):
            self._unlock()
            raise CheckpointError(f"another process is writing {self.path}")
        # A writer that died may have left files. The lock shows that no other process is writing them.
        for entry in self.writing.iterdir():
            entry.unlink()
        # A writer that died between the two renames left the user's other files in the replaced folder.
        self._finish_replacement()
        free = shutil.disk_usage(self.writing).free
        if free < nbytes:
            self.abandon()
            raise CheckpointError(
                f"the disk of {self.path} is full: the weights take {nbytes / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB "
                "are free"
            )
        return self.writing

    def commit(self) -> None:
        """Put the folder that was written, and is on the disk, in the place of the old one."""
        # The names of the new files have to be on the disk before the folder takes its place.
        sync_path(self.writing)
        # A rename cannot replace a folder with files in it, so the old folder moves aside first.
        if self.path.exists():
            self.path.rename(self._replaced)
        self.writing.rename(self.path)
        self._finish_replacement()
        sync_path(self.path.parent)
        self._unlock()

    def _finish_replacement(self) -> None:
        """Move what is no weight from the old folder to the new one, also for a writer that died before."""
        if not self._replaced.exists():
            return
        # The writer died before its second rename, so the old folder goes back.
        if not self.path.exists():
            self._replaced.rename(self.path)
            return
        for entry in self._replaced.iterdir():
            # A file that the new folder has already is newer than the old one.
            if not WEIGHTS.fullmatch(entry.name) and not (self.path / entry.name).exists():
                entry.rename(self.path / entry.name)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def abandon(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.writing, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
