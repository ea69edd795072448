"""Lock a folder of checkpoints for one job, and a checkpoint against removal while somebody reads it.

[Note: Locks]
The job that saves holds the file `.lock` of the folder. The lock belongs to a run of a launcher. Where a process of an
earlier round of the same run still holds it, which cannot be ended because its node is frozen or out of reach, the
later round puts a lock file of its own in its place. The earlier process notices that before it renames anything
(`FolderLock.check`).

A reader holds a shared lock of the manifest of the checkpoint that it reads, and nobody removes a checkpoint whose
manifest is locked. Where the file system has no locks, a reader finds out afterwards that the checkpoint is gone, and
takes the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import weakref
from pathlib import Path
from typing import IO, Any

from zeroengine.errors import CheckpointError

LOCK = ".lock"


class FolderLock:
    """This process's lock of a folder of checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[str] | None = None
        self._run = _own_run()
        # Forked children need to find the locks that they inherit.
        _locks.add(self)

    def acquire(self) -> bool:
        """Lock the folder, which exists. Return False where this process has locked it already.

        Raises:
            CheckpointError: Another job saves into the folder, or has taken it over.
            OSError: The lock file cannot be opened.
        """
        if self._file is not None:
            # The folder may have been taken over since the last save, and then this process must not save there.
            self.check()
            return False
        file = _open_lock_file(self._folder / LOCK)
        # The lock is tried and never waited for: the job that holds it may run for days.
        if not try_lock(file, fcntl.LOCK_EX):
            # The holder wrote who it is into the file. The read is bounded, since the file may be anything.
            holder, _, holders_run = file.read(1000).partition("\n")
            file.close()
            # Only a round that the launcher itself has given up may lose the folder. Another job is alive and keeps it.
            if not _is_earlier_round(holders_run.strip(), self._run):
                raise CheckpointError(
                    f"another job saves into {self._folder} ({holder or 'another process'}): give each job, "
                    "and each engine, a folder of its own"
                )
            file = self._replace_lock_file()
        # The name is written only after the lock is held, so a process that is refused never overwrites the holder's.
        file.seek(0)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n{self._run}\n")
        file.flush()
        self._file = file
        return True

    def _replace_lock_file(self) -> IO[str]:
        """Put a new lock file in the place of the one that an earlier round of this run holds."""
        new = self._folder / f"{LOCK}.{secrets.token_hex(4)}"
        # The file is locked under a name of its own first. It appears under the common name already locked, so no third
        # process can lock it in between.
        file = _open_lock_file(new)
        try:
            try_lock(file, fcntl.LOCK_EX)
            new.rename(self._folder / LOCK)
        except OSError as error:
            file.close()
            new.unlink(missing_ok=True)
            raise CheckpointError(f"{self._folder / LOCK} cannot be replaced: {error.strerror}") from error
        return file

    def check(self) -> None:
        """Check that the folder is still locked by this process.

        Raises:
            CheckpointError: A later round of this run has taken the folder over.
        """
        # The descriptor still refers to the old file after a replacement, so the inodes differ.
        assert self._file is not None
        is_present = False
        with contextlib.suppress(OSError):
            is_present = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._folder / LOCK))
        if not is_present:
            raise CheckpointError(
                f"{self._folder} has been taken over by a later round of this run, or its {LOCK} file was removed: "
                "this process saves there no more"
            )

    def release(self) -> None:
        """Unlock the folder, if this process has locked it."""
        if self._file is not None:
            # A forked process may still have the file open, so closing it here alone would not unlock it.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """Close the lock file without unlocking it for other processes."""
        # Closing a descriptor does not unlock where a copy of it is open elsewhere. That is right in a forked child,
        # whose parent keeps the lock.
        file, self._file = self._file, None
        if file is not None:
            file.close()


_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _forget_locks_after_fork() -> None:
    """Leave the locks to the parent, in a forked process such as a DataLoader's worker.

    The lock would otherwise last as long as the worker, which may outlive the job.
    """
    # A weak set may lose members while it is iterated, so a list is taken first.
    for lock in list(_locks):
        lock.forget()


os.register_at_fork(after_in_child=_forget_locks_after_fork)


def try_lock(file: IO[Any] | int, kind: int) -> bool:
    """Lock an open file or its descriptor without waiting. Return False where another process has locked it.

    A file system without locks counts as success: the readers' and writers' other checks must do.
    """
    try:
        # flock belongs to the open file. A POSIX record lock would be lost whenever this process closed any other
        # descriptor of the same file.
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
    return True


def _own_run() -> str:
    """Return the launcher's run that this process belongs to and the number of its round, or "" without a launcher."""
    run, round_ = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    # torchrun writes "none" where the user gave no id. Such runs cannot be told apart.
    return f"run {run} round {round_}" if run not in ("", "none") and round_.isdecimal() else ""


def _is_earlier_round(holders_run: str, own_run: str) -> bool:
    """Return whether the lock's holder, by what it wrote, is of an earlier round of this process's run."""
    holder, own = (re.fullmatch(r"run (.*) round (\d+)", text) for text in (holders_run, own_run))
    # An equal round is a second process of the same run and no frozen predecessor.
    return bool(holder and own and holder[1] == own[1] and int(holder[2]) < int(own[2]))


def _open_lock_file(path: Path) -> IO[str]:
    """Open a lock file, and nothing that a link or a device's name leads to.

    Raises:
        CheckpointError: The path is no regular file.
    """
    try:
        # Folders of checkpoints are often shared. O_NOFOLLOW refuses a link that somebody else planted, and O_NONBLOCK
        # keeps the open of a pipe from waiting.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise CheckpointError(f"{path} is not a lock file ({error.strerror}): remove it") from None
        raise
    # A device or a pipe can be opened, but truncating it or writing to it may do harm.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a lock file: remove it")
    return os.fdopen(descriptor, "r+", errors="replace")
