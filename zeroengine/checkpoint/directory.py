"""A folder of checkpoints: where its files are, and how a checkpoint appears and disappears in one operation.

    runs/a/
      latest                   the tag of the newest checkpoint
      step-200/                one checkpoint: a DCP checkpoint, and
        zeroengine.json        its manifest
      .step-300.1f3a9c02.writing/   one that is being written, or whose writer died
      .step-200.90c4aa17.replaced/  one that another of its tag is about to replace
      .lock                    held by the job that saves here

A checkpoint is written beside the others, synced, and renamed; `latest` is written last. So whatever happens, a tag
names a whole checkpoint, and so does `latest`. Checkpoints are ordered by when they were saved (`Manifest.sequence`)
and not by their steps: after a return to an earlier checkpoint the steps begin again. Who may save and remove is in
"Locks" of `folder_lock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.checkpoint.folder_lock import FolderLock, try_lock
from zeroengine.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from zeroengine.errors import CheckpointError

LATEST = "latest"
# A file system takes names of at most so many characters.
MAX_NAME = 255
# A new tag is shorter, since the name of its directory is longer while it is written.
MAX_TAG = 200
TAG = re.compile(r"[A-Za-z0-9][\w.+=@-]*")


def check_tag(tag: str) -> str:
    """Return `tag`, which can name a directory.

    Raises:
        CheckpointError: It cannot.
    """
    if not isinstance(tag, str) or not TAG.fullmatch(tag) or tag == LATEST or len(tag) > MAX_NAME:
        raise CheckpointError(
            f"a tag is a folder's name of letters, digits and ._+=@-, beginning with a letter or digit, such as "
            f'"step-1000"; found {tag!r}'
        )
    return tag


class MissingCheckpointError(CheckpointError):
    """There is no checkpoint of this name."""


class CheckpointFolder:
    """One folder of checkpoints on this rank's file system."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # One lock for each folder and process. Opening the folder twice does not lock it twice.
        self._lock = FolderLock(self.path)

    # -- Reading ----------------------------------------------------------------------------------

    def tags(self) -> list[str]:
        """Return the tag of every whole checkpoint, the oldest first.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        return [tag for *_, tag in self._by_age()]

    def _by_age(self) -> list[tuple[int, str, float, str]]:
        """Return the order and the tag of every whole checkpoint, the oldest first."""
        if self.path.is_file():
            raise CheckpointError(f"{self.path} is a file: checkpoints are kept in a folder")
        if not self.path.is_dir():
            return []
        with as_checkpoint_errors(f"{self.path} cannot be read"):
            # Hidden names are checkpoints that are being written or removed, and the lock.
            names = [entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")]
        checkpoints = []
        for name in names:
            # Another process may remove a checkpoint between the listing and this read.
            with contextlib.suppress(CheckpointError, OSError):
                path = self.path / name / MANIFEST
                if path.is_file():
                    manifest = self.manifest(name)
                    checkpoints.append((manifest.sequence, manifest.saved_at, path.stat().st_mtime, name))
        # The sequence comes first in the key, since clocks of different nodes disagree.
        return sorted(checkpoints)

    def latest(self) -> str:
        """Return the tag of the newest checkpoint.

        Raises:
            CheckpointError: There is none, or the file `latest` names none.
        """
        try:
            # `latest` is one small file and cheap to read. Looking at all manifests is needed only where it is missing.
            with open(self.path / LATEST, "rb") as file:
                # The read is bounded, because a damaged file may be of any size.
                return check_tag(file.read(2 * MAX_TAG).decode().strip())
        except (FileNotFoundError, NotADirectoryError):
            # A writer that died before its first `latest` left whole checkpoints, and the newest of them is the answer.
            if tags := self.tags():
                return tags[-1]
            # Users often pass the checkpoint itself, so the message shows the corrected call.
            if (self.path / MANIFEST).is_file():
                raise CheckpointError(
                    f"{self.path} is one checkpoint, not a folder of them: pass {str(self.path.parent)!r} and "
                    f"tag={self.path.name!r}"
                ) from None
            problem = f"{self.path} holds no checkpoint" if self.path.is_dir() else f"there is no folder {self.path}"
            raise CheckpointError(f"{problem}. engine.save_checkpoint({str(self.path)!r}) writes one.") from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise CheckpointError(
                f"{self.path / LATEST} does not name a checkpoint ({reason}): name one with tag=, or take the newest "
                "that is whole with fallback=True"
            ) from error

    @contextlib.contextmanager
    def held(self, tag: str) -> Iterator[None]:
        """Keep a checkpoint from being removed meanwhile.

        Raises:
            CheckpointError: It does not exist, or is being removed.
        """
        path = self.checkpoint(tag) / MANIFEST
        # The lock belongs to the open file and ends with it, so the file stays open for as long as the checkpoint is
        # read.
        with as_checkpoint_errors(f"{path} cannot be read"):
            file = open(path, "rb")
        with file:
            # The remover locks the manifest exclusively before it renames the directory. A failure here means that it
            # came first.
            if not try_lock(file, fcntl.LOCK_SH):
                raise CheckpointError(f"checkpoint {tag!r} in {self.path} is being removed")
            yield

    def identity(self, tag: str) -> tuple[int, int] | None:
        """Return a pair that differs for another checkpoint of the same tag; None where there is none."""
        try:
            manifest = (self.checkpoint(tag) / MANIFEST).stat()
        except (CheckpointError, OSError):
            return None
        # A replaced checkpoint has another manifest file, so its inode tells the two apart even where tag and size are
        # equal.
        return manifest.st_dev, manifest.st_ino

    def checkpoint(self, tag: str) -> Path:
        """Return the directory of a checkpoint.

        Raises:
            MissingCheckpointError: There is no such checkpoint.
            CheckpointError: Its writer did not finish.
        """
        path = self.path / check_tag(tag)
        # A writer that died between two renames left the checkpoint under the name with `.replaced`. It is whole, so
        # readers take it, the newest where there are several.
        if not path.exists():
            replaced = (entry for entry in self.path.glob(".*.replaced") if tag_of(entry.name) == tag)
            path = max(replaced, key=_modified, default=path)
        # The manifest is written last within a directory. Without it the writer did not finish.
        if not (path / MANIFEST).is_file():
            tags = self.tags()
            others = f"there are: {', '.join(tags[-10:])}" if tags else "there is none"
            if not path.is_dir():
                raise MissingCheckpointError(f"checkpoint {tag!r} in {self.path} does not exist; {others}")
            raise CheckpointError(
                f"checkpoint {tag!r} in {self.path} is not whole: its writer did not finish; {others}"
            )
        return path

    def manifest(self, tag: str) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises:
            CheckpointError: There is no such checkpoint, or its manifest is damaged.
        """
        return read_manifest(self.checkpoint(tag) / MANIFEST)

    # -- Writing, by one rank ---------------------------------------------------------------------

    def open(self) -> None:
        """Make the folder and lock it for this job, and clear what dead writers left in it.

        Raises:
            CheckpointError: The folder cannot be written, or another job saves into it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # A second call of this process must not clear the directory that a save of its own is writing.
            if not self._lock.acquire():
                return
        except (FileExistsError, NotADirectoryError):
            raise CheckpointError(f"{self.path} is a file: checkpoints are kept in a folder") from None
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror}") from error
        # The lock is held, so no living writer owns these directories.
        for entry in self.path.glob(".*.writing"):
            shutil.rmtree(entry, ignore_errors=True)
        # The newest comes first. Where the directory of a tag is missing, the newest one takes its place and the older
        # ones are removed.
        for entry in sorted(self.path.glob(".*.replaced"), key=_modified, reverse=True):
            if (self.path / tag_of(entry.name)).exists():
                self._remove(entry)
            else:
                entry.rename(self.path / tag_of(entry.name))

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    def begin(self, tag: str, nbytes: int, reused: Path | None = None) -> Path:
        """Return a directory to write a checkpoint into.

        Args:
            tag: The checkpoint's name.
            nbytes: The bytes that will be written at least.
            reused: What `hide` returned of an earlier checkpoint, whose files are written over. The caller removes what
                is left of them before `commit`. None begins with an empty directory.

        Raises:
            CheckpointError: The disk has not as many bytes free, or the tag is too long.
        """
        # The free space is checked first, since a full disk would otherwise be found only after a long write.
        free = shutil.disk_usage(self.path).free
        if reused is not None:
            free += sum(entry.stat().st_blocks * 512 for entry in reused.iterdir())
        if free < nbytes:
            raise CheckpointError(
                f"the disk of {self.path} is full: the checkpoint takes {nbytes / 2**20:,.0f} MiB, "
                f"{free / 2**20:,.0f} MiB are free"
            )
        if len(check_tag(tag)) > MAX_TAG:
            raise CheckpointError(f"a tag has at most {MAX_TAG} characters; found {len(tag)}")
        # A random part keeps the name free even if a removal of an earlier attempt failed.
        path = self.path / f".{tag}.{secrets.token_hex(4)}.writing"
        if reused is None:
            path.mkdir()
        else:
            reused.rename(path)
        return path

    def abandon(self, writing: Path) -> None:
        """Remove a checkpoint that could not be finished."""
        shutil.rmtree(writing, ignore_errors=True)

    def commit(self, writing: Path, manifest: Manifest, keep: int | None) -> None:
        """Make a written directory the newest checkpoint, and remove the oldest beyond `keep`.

        Args:
            writing: The directory that `begin` returned, with every file in it but the manifest.
            manifest: The checkpoint's manifest. Its `sequence` is raised above those in the folder.
            keep: The number of checkpoints to keep; None keeps all.

        Raises:
            CheckpointError: A later round of this run has taken the folder over.
            OSError: Writing failed.
        """
        # The folder is read again at every commit, since other tools may have removed checkpoints meanwhile.
        older = self._by_age()
        sequence = max(manifest.sequence, 1 + (older[-1][0] if older else 0))
        manifest = manifest.model_copy(update={"sequence": sequence})
        # Each step is on the disk before the next one begins: a power cut between two of them leaves a whole
        # checkpoint under every tag.
        with _synced(writing / MANIFEST) as file:
            file.write(manifest.to_json())
        sync_path(writing)
        # The write may have taken long enough for a later round to take the folder over. From here on names change, so
        # this is the last moment to stop.
        self._lock.check()
        target = self.path / manifest.tag
        replaced = self.path / f".{manifest.tag}.{secrets.token_hex(4)}.replaced"
        # A directory cannot be replaced by a rename in one operation, so the old checkpoint moves aside first. A crash
        # between the two renames leaves it under a name that readers and the next job find.
        if target.exists():
            target.rename(replaced)
        writing.rename(target)
        sync_path(self.path)
        # `latest` is replaced by a rename, so a reader sees the old tag or the new one and never half of it.
        with _synced(self.path / f".{LATEST}.new") as file:
            file.write(manifest.tag + "\n")
        (self.path / f".{LATEST}.new").rename(self.path / LATEST)
        sync_path(self.path)
        # The old checkpoint of this tag goes only now, when the new one and `latest` are on the disk.
        if replaced.exists():
            self._remove(replaced)
        if keep is not None:
            # With `keep` 1 the slice must cover the whole list, and `-0` would make it empty.
            self.remove([tag for *_, tag in older if tag != manifest.tag][: -(keep - 1) or None])

    def remove(self, tags: Iterable[str]) -> None:
        """Remove checkpoints, except those that somebody reads."""
        for tag in tags:
            self._remove(self.path / tag)

    def _remove(self, path: Path) -> None:
        """Remove the directory of a checkpoint, unless somebody reads it: then a later save or job removes it."""
        # Removing is housekeeping and must not fail a save. The next job tries again.
        if (removed := self.hide(path.name)) is not None:
            shutil.rmtree(removed, ignore_errors=True)

    def hide(self, name: str) -> Path | None:
        """Hide the directory of a checkpoint from readers, and return its new path; None if somebody reads it.

        A directory that is neither removed nor reused afterwards is cleared by the next job.
        """
        path, hidden = self.path / name, self.path / f".{tag_of(name)}.{secrets.token_hex(4)}.writing"
        try:
            # NFS locks a file exclusively only where it is open for writing.
            with open(path / MANIFEST, "r+b") as file:
                if not try_lock(file, fcntl.LOCK_EX):
                    return None
                # The rename hides the checkpoint from new readers before its files begin to disappear.
                path.rename(hidden)
        except FileNotFoundError:
            # A directory without a manifest cannot be read, so nobody holds a lock of it.
            if not path.exists():
                return None
            path.rename(hidden)
        except OSError:
            return None
        return hidden


def tag_of(name: str) -> str:
    """Return the tag of a checkpoint, from the name of its directory, be it written, replaced or neither."""
    # Directories of earlier versions have no random part in their names.
    match = re.fullmatch(r"\.(.+?)(\.[0-9a-f]{8})?\.(writing|replaced)", name)
    return match[1] if match is not None else name


def sync_path(path: Path) -> None:
    """Return when a file's content or the names in a directory are on the disk."""
    # A rename is on the disk only after the directory itself was synced.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key that orders `step-9` before `step-10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _modified(path: Path) -> float:
    # Another process may have removed the directory since it was listed.
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[IO[str]]:
    """Open a file to write, which is on the disk when it is closed."""
    with open(path, "w") as file:
        yield file
        # fsync sees only what has left Python's buffer.
        file.flush()
        os.fsync(file.fileno())
