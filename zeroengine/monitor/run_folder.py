"""Write a run to a folder: ``run.json``, and lines of JSON in ``steps.jsonl`` and ``events.jsonl``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroengine.errors import ZeroEngineError
from zeroengine.monitor.record import FORMAT, RunEvent, StepRecord

# zero-launch --run-folder names the folder by this variable.
RUN_FOLDER_VARIABLE = "ZEROENGINE_RUN_FOLDER"
STEPS, EVENTS, RUN = "steps.jsonl", "events.jsonl", "run.json"


class RunFolder:
    """A ``Sink`` that appends to a folder, so that a restarted run continues it.

    Args:
        path: The folder. It is made if it is absent.
        run: What ``run.json`` says of the run. It replaces what an earlier run of this folder wrote, except for when
            that started.

    Raises:
        ZeroEngineError: The folder cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], run: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._files: dict[str, int] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # A reader sees the old file or the new one, never a part of one.
            partial = self.path / f".{RUN}.{os.getpid()}"
            content = {"format": FORMAT, **run, **_first_start(self.path / RUN)}
            partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
            partial.replace(self.path / RUN)
            for name in (STEPS, EVENTS):
                self._files[name] = _open_lines(self.path / name)
        except OSError as error:
            self.close()
            raise ZeroEngineError(
                f"monitor.folder {self.path} cannot be written ({error.strerror}): write a folder that rank 0 can write"
            ) from error

    def step(self, record: StepRecord) -> None:
        """Append a line to ``steps.jsonl``."""
        self._append(STEPS, record.to_json())

    def event(self, event: RunEvent) -> None:
        """Append a line to ``events.jsonl``."""
        self._append(EVENTS, event.to_json())

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        line = json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n"
        # One write to a file that is opened for appending is never mixed with those of other processes, such as
        # zero-launch's.
        os.write(self._files[name], line.encode())

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def append_event(folder: Path, event: RunEvent) -> None:
    """Append an event to a run folder that another process may be writing.

    Raises:
        OSError: The folder cannot be written.
    """
    descriptor = _open_lines(folder / EVENTS)
    try:
        os.write(descriptor, (json.dumps(event.to_json(), separators=(",", ":"), allow_nan=False) + "\n").encode())
    finally:
        os.close(descriptor)


def _first_start(path: Path) -> dict[str, Any]:
    """Return when the run of an earlier ``run.json`` started, if there is one: a restart goes on with that run."""
    try:
        return {"started": json.loads(path.read_text())["started"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _open_lines(path: Path) -> int:
    """Open a file for appending. If its last line is not whole, because its writer was killed, end that line."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor
