"""A folder of checkpoints: what lies where, and how a checkpoint comes and goes as a whole.

    runs/a/
      latest                  the tag of the newest checkpoint
      step-200/               one checkpoint: a DCP checkpoint, and
        zeroengine.json       what it is, with the size and checksum of every file, and of itself
      .step-300.1f3a.writing/ one that is being written, or whose writer died
      .step-200.90c4.replaced/ one that another of its tag is about to replace
      .lock                   held by the job that saves here

A checkpoint is written beside, synced, and renamed; ``latest`` is moved last. So whatever happens, a tag names a
whole checkpoint, and so does ``latest``. Checkpoints are ordered by when they were saved (``Manifest.sequence``), not
by their steps: after a return to an earlier checkpoint the steps begin again.

[Note: Locks]
The job that saves holds ``.lock``. It belongs to a run of a launcher: where a process of an earlier round of the same
run still holds it, which cannot be ended because its node is frozen or out of reach, the later round puts a lock file
of its own in its place. The earlier process finds that out before it renames anything (``_check_lock``).
A reader holds ``zeroengine.json`` of the checkpoint that it reads, and nobody removes a checkpoint that is held. Where
the file system has no locks, a reader finds out afterwards that the checkpoint has gone, and takes the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import xxhash
from annotated_types import Ge, Le, MinLen
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zeroengine.errors import CheckpointError
from zeroengine.utils.paths import is_file_name

MANIFEST, LATEST, LOCK = "zeroengine.json", "latest", ".lock"
CHECKSUM = "checksum"  # of the rest of the manifest
FORMAT = 2  # 1 had neither checksum nor sequence
MAX_NAME = 255  # characters of a directory's name
MAX_TAG = 200  # of a new tag, which has more around it while it is written
TAG = re.compile(r"[A-Za-z0-9][\w.+=@-]*")
CHUNK = 1 << 22


class FileRecord(BaseModel):
    """A file of a checkpoint."""

    bytes: Annotated[int, Ge(0)]
    xxh3: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    items: Annotated[str, Field(pattern="^[0-9a-f]{16}$")] | None = None  # see ``metadata.digest_of_items``


class Manifest(BaseModel):
    """What a checkpoint is.

    Attributes:
        sequence: larger than that of every checkpoint that was in the folder when it was saved; 0 in format 1.
    """

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="constants")

    format: Annotated[int, Ge(1)]
    tag: str
    step: Annotated[int, Ge(0)]
    stage: Annotated[int, Ge(0), Le(3)]
    world_size: Annotated[int, Ge(1)]
    precision: str
    optimizer: str
    saved_at: str
    sequence: Annotated[int, Ge(0)] = 0
    versions: dict[str, str]
    counters: dict[str, Annotated[int, Ge(0)]]
    param_groups: list[dict[str, Any]]
    loss_scaler: dict[str, Any]
    config: dict[str, Any]
    files: Annotated[dict[str, FileRecord], MinLen(1)]

    @property
    def nbytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def order(self) -> tuple[int, str]:
        """What checkpoints of a folder are ordered by: when they were saved."""
        return self.sequence, self.saved_at

    def to_json(self) -> str:
        """The file's text, with a checksum of the rest in it."""
        tree = json.loads(self.model_dump_json())
        return json.dumps(tree | {CHECKSUM: _checksum_of_tree(tree)}, indent=1)


def _parse(text: str) -> Manifest:
    """
    Raises:
        ValueError: it is no manifest, or was changed.
    """
    tree = json.loads(text)
    if not isinstance(tree, dict):
        raise ValueError("it is no JSON object")
    number = tree.get("format")
    if isinstance(number, int) and number > FORMAT:
        raise CheckpointError(
            f"has format {number}; this version of zeroengine reads up to {FORMAT}: install a newer one"
        )
    expected = tree.pop(CHECKSUM, None)
    if number != 1 and expected != _checksum_of_tree(tree):
        raise ValueError("its checksum differs")
    manifest = Manifest.model_validate(tree)
    for name in manifest.files:
        if not is_file_name(name):
            raise ValueError(f"it lists a file outside of the checkpoint, {name!r}")
    return manifest


def _checksum_of_tree(tree: dict[str, Any]) -> str:
    return xxhash.xxh3_64(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def check_tag(tag: str) -> str:
    """Raises: CheckpointError: ``tag`` cannot name a folder."""
    if not isinstance(tag, str) or not TAG.fullmatch(tag) or tag in (LATEST,) or len(tag) > MAX_NAME:
        raise CheckpointError(
            f"a tag is a folder's name of letters, digits and ._+=@-, beginning with a letter or digit, such as "
            f'"step-1000"; found {tag!r}'
        )
    return tag


class CheckpointDirectory:
    """One folder of checkpoints on this rank's file system."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock: IO[str] | None = None
        self._run = _own_run()

    # -- looking ----------------------------------------------------------------------------------

    def tags(self) -> list[str]:
        """Every whole checkpoint, oldest first."""
        return [tag for *_, tag in self._by_age()]

    def _by_age(self) -> list[tuple[int, str, float, str]]:
        """Return of every whole checkpoint when it was saved, as they are ordered, and its tag; the oldest first."""
        if self.path.is_file():
            raise CheckpointError(f"{self.path} is a file: checkpoints are kept in a folder")
        if not self.path.is_dir():
            return []
        try:
            names = [entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        found = []
        for name in names:
            with contextlib.suppress(CheckpointError, OSError):
                if (self.path / name / MANIFEST).is_file():
                    found.append((*self.manifest(name).order, (self.path / name / MANIFEST).stat().st_mtime, name))
        return sorted(found)

    def latest(self) -> str:
        """The tag of the newest checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        try:
            with open(self.path / LATEST, "rb") as file:
                return check_tag(file.read(2 * MAX_TAG).decode().strip())
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
        except (OSError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else str(error)
            raise CheckpointError(
                f"{self.path / LATEST} does not name a checkpoint ({what}): name one with tag=, or take the newest "
                "that is whole with fallback=True"
            ) from error

    @contextlib.contextmanager
    def held(self, tag: str) -> Iterator[None]:
        """Keep a checkpoint from being removed meanwhile.

        Raises:
            CheckpointError: it is not there, or is being removed.
        """
        path = self.checkpoint(tag) / MANIFEST
        try:
            file = open(path, "rb")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        with file:
            if not _lock_file(file, fcntl.LOCK_SH):
                raise CheckpointError(f"checkpoint {tag!r} in {self.path} is being removed")
            yield

    def identity(self, tag: str) -> tuple[int, int] | None:
        """What tells a checkpoint from another of its tag; None where there is none."""
        try:
            found = (self.checkpoint(tag) / MANIFEST).stat()
        except (CheckpointError, OSError):
            return None
        return found.st_dev, found.st_ino

    def checkpoint(self, tag: str) -> Path:
        """The directory of a checkpoint that is there.

        Raises:
            CheckpointError: it is not.
        """
        path = self.path / check_tag(tag)
        if not path.exists() and (replaced := self._replaced(tag)):  # its writer died between two renames
            path = replaced[-1]
        if not (path / MANIFEST).is_file():
            tags = self.tags()
            there = f"there are: {', '.join(tags[-10:])}" if tags else "there is none"
            state = "is not whole: its writer did not finish" if path.is_dir() else "does not exist"
            raise CheckpointError(f"checkpoint {tag!r} in {self.path} {state}; {there}")
        return path

    def manifest(self, tag: str) -> Manifest:
        path = self.checkpoint(tag) / MANIFEST
        try:
            return _parse(path.read_text(encoding="utf-8"))
        except CheckpointError as error:
            raise CheckpointError(f"{path} {error}") from None
        except ValidationError as error:
            wrong = ", ".join(".".join(str(part) for part in item["loc"]) for item in error.errors()[:3])
            raise CheckpointError(f"{path} is damaged: wrong or missing are {wrong}") from error
        except (OSError, ValueError, RecursionError) as error:
            what = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
            raise CheckpointError(f"{path} is damaged: {what}") from error

    def damage(self, tag: str, files: Iterable[str], report: Callable[[int], None] = lambda n: None) -> list[str]:
        """What is wrong with some of a checkpoint's files: missing, of another size, or of another checksum."""
        path, manifest = self.checkpoint(tag), self.manifest(tag)
        found: list[str] = []
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
            self._check_lock()
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = _open_lock(self.path / LOCK)
        except (FileExistsError, NotADirectoryError):
            raise CheckpointError(f"{self.path} is a file: checkpoints are kept in a folder") from None
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror}") from error
        if not _lock_file(lock, fcntl.LOCK_EX):
            holder, _, run = lock.read(1000).partition("\n")
            lock.close()
            if not _is_earlier_round(run.strip(), self._run):
                raise CheckpointError(
                    f"another job saves into {self.path} ({holder or 'another process'}): give each job a folder of "
                    "its own"
                )
            lock = self._take_over_lock()
        lock.seek(0)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}\n{self._run}\n")
        lock.flush()
        self._lock = lock
        _locked_directories.add(self)
        for entry in self.path.glob(".*.writing"):  # of writers that died
            shutil.rmtree(entry, ignore_errors=True)
        for entry in sorted(self.path.glob(".*.replaced"), key=_modified, reverse=True):
            if (self.path / tag_of(entry.name)).exists():
                self._remove(entry)
            else:
                entry.rename(self.path / tag_of(entry.name))

    def _take_over_lock(self) -> IO[str]:
        """Put a lock of our own in the place of one that an earlier round of this run holds."""
        new = self.path / f"{LOCK}.{secrets.token_hex(4)}"
        lock = _open_lock(new)
        try:
            _lock_file(lock, fcntl.LOCK_EX)
            new.rename(self.path / LOCK)
        except OSError as error:
            lock.close()
            new.unlink(missing_ok=True)
            raise CheckpointError(f"{self.path / LOCK} cannot be replaced: {error.strerror}") from error
        return lock

    def _check_lock(self) -> None:
        """
        Raises:
            CheckpointError: a later round of this run has taken over the folder.
        """
        assert self._lock is not None
        mine = os.fstat(self._lock.fileno())
        try:
            there = (self.path / LOCK).stat()
        except OSError:
            there = None
        if there is None or (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
            raise CheckpointError(
                f"{self.path} has been taken over by a later round of this run, or its {LOCK} file was removed: this "
                "process saves there no more"
            )

    def close(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # a process that was forked may have it open still
            self._lock.close()
            self._lock = None
        _locked_directories.discard(self)

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
        if len(check_tag(tag)) > MAX_TAG:
            raise CheckpointError(f"a tag has at most {MAX_TAG} characters; found {len(tag)}")
        path = self.path / f".{tag}.{secrets.token_hex(4)}.writing"
        path.mkdir()
        return path

    def _replaced(self, tag: str) -> list[Path]:
        """Directories of checkpoints that another of their tag has replaced, or was about to; the last one last."""
        found = [entry for entry in self.path.glob(".*.replaced") if tag_of(entry.name) == tag]
        return sorted(found, key=_modified)

    def abandon(self, writing: Path) -> None:
        shutil.rmtree(writing, ignore_errors=True)

    def commit(self, writing: Path, manifest: Manifest, keep: int | None) -> None:
        """Makes what was written the newest checkpoint; removes the oldest beyond ``keep``."""
        before = self._by_age()
        manifest = manifest.model_copy(update={"sequence": 1 + (before[-1][0] if before else 0)})
        with _synced(writing / MANIFEST) as file:
            file.write(manifest.to_json())
        sync_directory(writing)
        self._check_lock()
        target = self.path / manifest.tag
        replaced = self.path / f".{manifest.tag}.{secrets.token_hex(4)}.replaced"
        if target.exists():
            target.rename(replaced)
        writing.rename(target)
        sync_directory(self.path)
        with _synced(self.path / f".{LATEST}.new") as file:
            file.write(manifest.tag + "\n")
        (self.path / f".{LATEST}.new").rename(self.path / LATEST)
        sync_directory(self.path)
        if replaced.exists():
            self._remove(replaced)
        if keep is not None:
            for tag in [tag for *_, tag in before if tag != manifest.tag][: -(keep - 1) or None]:
                self._remove(self.path / tag)

    def _remove(self, path: Path) -> None:
        """Remove the directory of a checkpoint, unless somebody reads it: a later save, or job, will."""
        dying = self.path / f".{tag_of(path.name)}.{secrets.token_hex(4)}.writing"
        try:
            with open(path / MANIFEST, "r+b") as file:  # NFS locks for one's own use only what is open for writing
                if not _lock_file(file, fcntl.LOCK_EX):
                    return
                path.rename(dying)
        except FileNotFoundError:
            if path.exists():
                path.rename(dying)  # it has no manifest, so nobody reads it
        except OSError:
            return
        shutil.rmtree(dying, ignore_errors=True)


_locked_directories: weakref.WeakSet[CheckpointDirectory] = weakref.WeakSet()  # that hold a lock


def _forget_locks() -> None:
    """In a process that was forked, such as a DataLoader's worker: the lock is its parent's alone."""
    for directory in list(_locked_directories):
        lock, directory._lock = directory._lock, None
        if lock is not None:
            lock.close()
    _locked_directories.clear()


os.register_at_fork(after_in_child=_forget_locks)


def _lock_file(file: IO[Any], kind: int) -> bool:
    """Lock a file without waiting. Return False where another has it; True also where there are no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
    return True


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def tag_of(name: str) -> str:
    """The tag of a checkpoint that is being written or has been replaced, from its directory's name."""
    if not name.startswith("."):
        return name
    middle = name.removeprefix(".").removesuffix(".writing").removesuffix(".replaced")
    tag, _, token = middle.rpartition(".")
    return tag if tag and re.fullmatch(r"[0-9a-f]{8}", token) else middle


def _own_run() -> str:
    """The launcher's run that this process belongs to, and the number of its round; "" where there is none."""
    run, round_ = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return f"run {run} round {round_}" if run not in ("", "none") and round_.isdecimal() else ""


def _is_earlier_round(held_by: str, own: str) -> bool:
    """Return whether the lock's holder, as it says, is of an earlier round of our own run."""
    theirs, ours = (re.fullmatch(r"run (.*) round (\d+)", text) for text in (held_by, own))
    return bool(theirs and ours and theirs[1] == ours[1] and int(theirs[2]) < int(ours[2]))


def _open_lock(path: Path) -> IO[str]:
    """Open a lock file, and nothing that a link or a device's name leads to.

    Raises:
        CheckpointError: it is none.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise CheckpointError(f"{path} is not a lock file ({error.strerror}): remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a lock file: remove it")
    return os.fdopen(descriptor, "r+", errors="replace")


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
