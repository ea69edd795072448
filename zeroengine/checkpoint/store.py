"""A folder of checkpoints: what lies where, and how a checkpoint comes and goes as a whole.

    runs/a/
      latest                  the tag of the newest checkpoint
      step-200/               one checkpoint: a DCP checkpoint, and
        zeroengine.json       what it is, with the size and checksum of every file
      .step-300.writing/      one that is being written, or whose writer died
      .step-200.replaced/     one that another of its tag is about to replace
      .lock                   held by the job that saves here

A checkpoint is written beside, synced, and renamed; ``latest`` is moved last. So whatever happens, a tag names a
whole checkpoint, and so does ``latest``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import CheckpointError

MANIFEST, LATEST, LOCK = "zeroengine.json", "latest", ".lock"
FORMAT = 1
TAG = re.compile(r"[A-Za-z0-9][\w.+=@-]*")
CHUNK = 1 << 22


class File(BaseModel):
    """A file of a checkpoint."""

    bytes: int
    xxh3: str


class Manifest(BaseModel):
    """What a checkpoint is."""

    model_config = ConfigDict(extra="ignore")

    format: int
    tag: str
    step: int
    stage: int
    world_size: int
    precision: str
    optimizer: str
    saved_at: str
    versions: dict[str, str]
    counters: dict[str, int]
    param_groups: list[dict[str, Any]]
    loss_scaler: dict[str, Any]
    config: dict[str, Any]
    files: dict[str, File]

    @property
    def nbytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def check_tag(tag: str) -> str:
    """Raises: CheckpointError: ``tag`` cannot name a folder."""
    if not isinstance(tag, str) or not TAG.fullmatch(tag) or tag in (LATEST,):
        raise CheckpointError(
            f"a tag is a folder's name of letters, digits and ._+=@-, beginning with a letter or digit, such as "
            f'"step-1000"; found {tag!r}'
        )
    return tag


class Store:
    """One folder of checkpoints on this rank's file system."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock: IO[str] | None = None

    # -- looking ----------------------------------------------------------------------------------

    def tags(self) -> list[str]:
        """Every whole checkpoint, oldest first."""
        if self.path.is_file():
            raise CheckpointError(f"{self.path} is a file: checkpoints are kept in a folder")
        if not self.path.is_dir():
            return []
        found = []
        for entry in self.path.iterdir():
            if not entry.name.startswith(".") and (entry / MANIFEST).is_file():
                with contextlib.suppress(CheckpointError):
                    found.append((self.manifest(entry.name).step, (entry / MANIFEST).stat().st_mtime, entry.name))
        return [tag for _, _, tag in sorted(found)]

    def latest(self) -> str:
        """The tag of the newest checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        try:
            tag = (self.path / LATEST).read_text().strip()
        except FileNotFoundError:
            tags = self.tags()
            if tags:
                return tags[-1]
            if (self.path / MANIFEST).is_file():
                raise CheckpointError(
                    f"{self.path} is one checkpoint, not a folder of them: pass {str(self.path.parent)!r} and "
                    f"tag={self.path.name!r}"
                ) from None
            where = f"{self.path} holds no checkpoint" if self.path.is_dir() else f"there is no folder {self.path}"
            raise CheckpointError(f"{where}. engine.save_checkpoint({str(self.path)!r}) writes one.") from None
        except NotADirectoryError:
            raise CheckpointError(f"{self.path} is a file: checkpoints are kept in a folder") from None
        return tag

    def checkpoint(self, tag: str) -> Path:
        """The directory of a checkpoint that is there.

        Raises:
            CheckpointError: it is not.
        """
        path = self.path / check_tag(tag)
        if not path.exists() and self._replaced(tag).exists():  # its writer died between two renames
            path = self._replaced(tag)
        if not (path / MANIFEST).is_file():
            tags = self.tags()
            there = f"there are: {', '.join(tags[-10:])}" if tags else "there is none"
            state = "is not whole: its writer did not finish" if path.is_dir() else "does not exist"
            raise CheckpointError(f"checkpoint {tag!r} in {self.path} {state}; {there}")
        return path

    def manifest(self, tag: str) -> Manifest:
        path = self.checkpoint(tag) / MANIFEST
        try:
            tree = json.loads(path.read_text())
            if isinstance(tree, dict) and isinstance(tree.get("format"), int) and tree["format"] > FORMAT:
                raise CheckpointError(
                    f"{path} has format {tree['format']}; this version of zeroengine reads up to {FORMAT}: install a "
                    "newer one"
                )
            return Manifest.model_validate(tree)
        except (OSError, ValueError, ValidationError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}") from error

    def damage(self, tag: str, files: Iterable[str], report: Callable[[int], None] = lambda n: None) -> list[str]:
        """What is wrong with some of a checkpoint's files: missing, of another size, or of another checksum."""
        path, manifest = self.checkpoint(tag), self.manifest(tag)
        found = []
        for name in files:
            expected = manifest.files[name]
            try:
                size = (path / name).stat().st_size
                if size != expected.bytes:
                    found.append(f"{path / name} has {size:,} bytes, not {expected.bytes:,}")
                elif checksum(path / name, report) != expected.xxh3:
                    found.append(f"{path / name} has been changed: its checksum differs")
            except OSError as error:
                found.append(f"{path / name} cannot be read: {error.strerror}")
        return found

    # -- writing, by one rank ---------------------------------------------------------------------

    def open(self) -> None:
        """Makes the folder and takes it for this job.

        Raises:
            CheckpointError: it cannot be written, or another job saves into it.
        """
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / LOCK, "a+")
        except FileExistsError:
            raise CheckpointError(f"{self.path} is a file: checkpoints are kept in a folder") from None
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise CheckpointError(
                f"another job saves into {self.path} ({holder}): give each job a folder of its own"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        lock.flush()
        self._lock = lock
        for entry in self.path.glob(".*.writing"):  # of writers that died
            shutil.rmtree(entry, ignore_errors=True)
        for entry in self.path.glob(".*.replaced"):
            tag = entry.name.removeprefix(".").removesuffix(".replaced")
            if (self.path / tag).exists():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.rename(self.path / tag)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begin(self, tag: str, nbytes: int) -> Path:
        """A new directory to write into.

        Raises:
            CheckpointError: there is no room for ``nbytes``.
        """
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise CheckpointError(
                f"the disk of {self.path} is full: the checkpoint takes {nbytes / 2**20:,.0f} MiB, "
                f"{free / 2**20:,.0f} MiB are free"
            )
        path = self.path / f".{check_tag(tag)}.writing"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def _replaced(self, tag: str) -> Path:
        return self.path / f".{tag}.replaced"

    def abandon(self, writing: Path) -> None:
        shutil.rmtree(writing, ignore_errors=True)

    def commit(self, writing: Path, manifest: Manifest, keep: int | None) -> None:
        """Makes what was written the newest checkpoint; removes the oldest beyond ``keep``."""
        with _synced(writing / MANIFEST) as file:
            file.write(manifest.model_dump_json(indent=1))
        sync_directory(writing)
        target = self.path / manifest.tag
        replaced = self._replaced(manifest.tag)
        if target.exists():
            target.rename(replaced)
        writing.rename(target)
        sync_directory(self.path)
        with _synced(self.path / f".{LATEST}.new") as file:
            file.write(manifest.tag + "\n")
        (self.path / f".{LATEST}.new").rename(self.path / LATEST)
        sync_directory(self.path)
        shutil.rmtree(replaced, ignore_errors=True)
        if keep is not None:
            for tag in [tag for tag in self.tags() if tag != manifest.tag][: -(keep - 1) or None]:
                dying = self.path / f".{tag}.writing"
                (self.path / tag).rename(dying)
                shutil.rmtree(dying, ignore_errors=True)


def checksum(path: Path, report: Callable[[int], None] = lambda n: None) -> str:
    total = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            total.update(chunk)
            report(len(chunk))
    return total.hexdigest()


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[IO[str]]:
    with open(path, "w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
