"""Write a run to a folder: ``run.json``, and lines of JSON in ``steps.jsonl`` and ``events.jsonl``."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from zeroengine.errors import ZeroEngineError
from zeroengine.monitor.record import FORMAT, RunEvent, StepRecord
from zeroengine.utils.files import EVENTS, RUN, STEPS, replace_file

log = logging.getLogger("zeroengine")

# zero-launch --run-folder names the folder by this variable.
RUN_FOLDER_VARIABLE = "ZEROENGINE_RUN_FOLDER"
# The folders that engines of this process are writing. Two engines would mix their steps in one folder.
_WRITTEN: WeakValueDictionary[Path, RunFolder] = WeakValueDictionary()


class RunFolder:
    """A ``Sink`` that appends to a folder, so that a restarted run continues it.

    If another engine is writing the folder, this one writes the folder ``engine-2`` in it, and so on.

    Args:
        path: The folder. It is made if it is absent.
        run: What ``run.json`` says of the run. It replaces what an earlier run of this folder wrote, except for when
            that started.

    Raises:
        ZeroEngineError: The folder cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], run: Mapping[str, Any]) -> None:
        self.path, number = Path(path), 1
        self._files: dict[str, int] = {}
        try:
            while not self._open():
                number += 1
                self.path = Path(path) / f"engine-{number}"
            content = {"format": FORMAT, **run, **_first_start(self.path / RUN)}
            replace_file(self.path / RUN, json.dumps(content, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            self.close()
            raise ZeroEngineError(
                f"monitor.folder {self.path} cannot be written ({error.strerror}): write a folder that rank 0 can write"
            ) from error
        if number > 1:
            log.warning("another engine writes the run folder %s, so this one writes %s", path, self.path)

    def _open(self) -> bool:
        """Open the files of lines, and return true, unless another engine is writing them."""
        # A lock concerns other processes only, and ends when this process closes the file anywhere.
        if self.path.absolute() in _WRITTEN:
            return False
        self.path.mkdir(parents=True, exist_ok=True)
        self._files[STEPS] = _open_lines(self.path / STEPS)
        if not _lock(self._files[STEPS]):
            self.close()
            return False
        self._files[EVENTS] = _open_lines(self.path / EVENTS)
        _WRITTEN[self.path.absolute()] = self
        return True

    def step(self, record: StepRecord) -> None:
        """Append a line to ``steps.jsonl``."""
        self._append(STEPS, record.to_json())

    def event(self, event: RunEvent) -> None:
        """Append a line to ``events.jsonl``."""
        self._append(EVENTS, event.to_json())

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        # Lines in a file that was removed would be lost without an error.
        if not os.fstat(self._files[name]).st_nlink:
            raise FileNotFoundError(f"{self.path / name} was removed")
        _append_line(self._files[name], value)

    def close(self) -> None:
        """Close the files."""
        if _WRITTEN.get(self.path.absolute()) is self:
            del _WRITTEN[self.path.absolute()]
        while self._files:
            os.close(self._files.popitem()[1])


def append_event(folder: Path, event: RunEvent) -> None:
    """Append an event to a run folder that another process may be writing.

    Raises:
        OSError: The folder cannot be written.
    """
    append_to_file(folder / EVENTS, event.to_json())


def append_to_file(path: Path, value: Mapping[str, Any]) -> None:
    """Append a value as a line of JSON to a file, which is made if it is absent.

    Raises:
        OSError: The file cannot be written.
    """
    descriptor = _open_lines(path)
    try:
        _append_line(descriptor, value)
    finally:
        os.close(descriptor)


def _first_start(path: Path) -> dict[str, Any]:
    """Return when the run of an earlier ``run.json`` started, if there is one: a restart goes on with that run."""
    try:
        return {"started": json.loads(path.read_text())["started"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _lock(descriptor: int) -> bool:
    """Lock a file until its process closes it or ends. Return false if another process has."""
    try:
        # Unlike flock's, these locks are not inherited by workers of data loaders, which may outlive a killed rank.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        # Some file systems know no locks.
        pass
    return True


def _append_line(descriptor: int, value: Mapping[str, Any]) -> None:
    line = (json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n").encode()
    # One write to a file that is opened for appending is never mixed with those of other processes, such as
    # zero-launch's.
    if os.write(descriptor, line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _open_lines(path: Path) -> int:
    """Open a file for appending. If its last line is not whole, because its writer was killed, end that line."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor
