"""Where weights go to: a folder that appears as a whole, and the words for dtypes and sizes. Needs no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from zeroengine.checkpoint.directory import sync_directory
from zeroengine.errors import CheckpointError
from zeroengine.utils.paths import checked_path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_dtype(name: object) -> str | None:
    """``bf16``, ``bfloat16`` or ``torch.bfloat16`` as torch's name for it; None stays None.

    Raises:
        CheckpointError: weights are not written in it.
    """
    if name is None:
        return None
    found = DTYPES.get(str(name), str(name).removeprefix("torch."))
    if found not in DTYPES.values():
        raise CheckpointError(f"dtype {name}: write {', '.join(DTYPES)}, or leave it out to keep each tensor's own")
    return found


class OutputFolder:
    """A folder that is to appear as a whole, written by one process or several.

    Where it is there already its weights give way, and everything else in it stays.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(checked_path(path, "the folder for the weights", CheckpointError)))
        self.writing = self.path.with_name(f".{self.path.name}.writing")
        self._replaced = self.path.with_name(f".{self.path.name}.replaced")
        self._lock: int | None = None

    def check(self, *, force: bool, apart_from: Iterable[Path] = ()) -> None:
        """Raises: CheckpointError: it cannot be written, or is there already and not to be replaced."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file: weights are written to a folder")
        if os.path.ismount(self.path):
            raise CheckpointError(f"{self.path} is a mount point: name a folder in it")
        for other in apart_from:
            other = Path(os.path.realpath(other))
            if self.path == other or self.path in other.parents or other in self.path.parents:
                raise CheckpointError(
                    f"{self.path} and the checkpoint {other} are one in the other: name a folder apart"
                )
        if not force and self.path.is_dir() and any(self.path.iterdir()):
            raise CheckpointError(
                f"{self.path} is there already: name another folder, or replace its weights with --force"
            )

    def begin(self, nbytes: int) -> Path:
        """The folder to write into, for this process.

        Raises:
            CheckpointError: somebody else is writing it, or there is no room for ``nbytes``.
        """
        try:
            self.writing.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.writing, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._unlock()
            raise CheckpointError(f"another process is writing {self.path}") from None
        for entry in self.writing.iterdir():  # of a writer that died
            entry.unlink()
        self._settle()
        free = shutil.disk_usage(self.writing).free
        if free < nbytes:
            self.abandon()
            raise CheckpointError(
                f"the disk of {self.path} is full: the weights take {nbytes / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB "
                "are free"
            )
        return self.writing

    def commit(self) -> None:
        """What was written, and is on the disk, becomes the folder."""
        sync_directory(self.writing)
        if self.path.exists():
            self.path.rename(self._replaced)
        self.writing.rename(self.path)
        self._settle()
        sync_directory(self.path.parent)
        self._unlock()

    def _settle(self) -> None:
        """Ends what ``commit`` began: what is no weight moves over from the folder that gave way."""
        if not self._replaced.exists():
            return
        if not self.path.exists():
            self._replaced.rename(self.path)
            return
        for entry in self._replaced.iterdir():
            if not WEIGHTS.fullmatch(entry.name) and not (self.path / entry.name).exists():
                entry.rename(self.path / entry.name)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def abandon(self) -> None:
        """Remove what was written so far, and release the folder."""
        shutil.rmtree(self.writing, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = None
