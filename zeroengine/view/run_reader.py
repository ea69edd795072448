"""Read a run folder, whole or while it grows: run.json, steps.jsonl and events.jsonl.

[Note: Thinning]
A run may have millions of steps, and a picture has a thousand points. The reader keeps the steps in groups of equal
numbers of steps. When there are too many groups, each two neighbors are merged. Groups are sums, so totals and means
over the run stay exact.

[Note: Repeated steps]
A run that was restarted goes on from its newest checkpoint, so some steps are taken again. The later record of a step
counts in the pictures. `RunReader.total` counts both, because both took time.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroengine.errors import ZeroEngineError
from zeroengine.utils.files import EVENTS, RUN, STEPS
from zeroengine.utils.progress import Report, ignore_progress, progress
from zeroengine.view.clean_values import clean_event, clean_facts
from zeroengine.view.step_group import StepGroup, merge_groups

# The newest format of run.json that this code knows.
KNOWN_FORMAT = 1
# The most groups of steps, and the most events of rare and of frequent kinds, that are kept.
MAX_GROUPS, MAX_EVENTS = 2048, 2048
FREQUENT_EVENTS = ("skip", "checkpoint")
NEWEST_EVENTS = 50
# "Recent" means the mean over so many steps.
RECENT_STEPS = 20
READ_BYTES = 1 << 20
# The reading of more bytes takes seconds, and has a progress bar.
LONG_READ_BYTES = 32 << 20
HOW_TO_WRITE = 'write "monitor": {"folder": "DIR"} in the configuration, or start it with zero-launch --run-folder DIR'


@dataclass
class GrowingLines:
    """The lines of a file that another process appends to. Each is returned once, when it is whole."""

    path: Path
    # The bytes after the last line's end.
    unfinished: bytes = b""
    line_number: int = 0
    damaged_lines: list[int] = field(default_factory=list)  # the first ones, for the message
    num_damaged: int = 0
    _offset: int = 0
    _inode: int = 0

    def read(self, report: Report = ignore_progress) -> Iterator[dict[str, Any]]:
        """Yield the objects of the lines that are new since the last call; damaged lines are counted and left out.

        Args:
            report: Called with the bytes that were read since its last call.
        """
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            # A file that was replaced or cut is read from its beginning.
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._offset, self.unfinished, self._inode = 0, b"", status.st_ino
            file.seek(self._offset)
            while data := file.read(READ_BYTES):
                self._offset += len(data)
                report(len(data))
                *lines, self.unfinished = (self.unfinished + data).split(b"\n")
                for line in lines:
                    self.line_number += 1
                    if line.strip():
                        yield from self._parse(line)

    def _parse(self, line: bytes) -> Iterator[dict[str, Any]]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield value
        else:
            self.note_damaged()

    def note_damaged(self) -> None:
        """Count the line that was read last as damaged."""
        self.num_damaged += 1
        if len(self.damaged_lines) < 3:
            self.damaged_lines.append(self.line_number)

    def notices(self) -> Iterator[str]:
        """Yield sentences about lines that are damaged or not whole."""
        if self.num_damaged:
            lines = ", ".join(map(str, self.damaged_lines)) + (", ..." if self.num_damaged > 3 else "")
            is_one = self.num_damaged == 1
            yield (
                f"{self.path.name}: line{'' if is_one else 's'} {lines} {'is' if is_one else 'are'} damaged and left "
                f"out ({self.num_damaged} of {self.line_number} lines)"
            )
        if self.unfinished.strip():
            yield f"{self.path.name}: the last line is not whole yet and is left out"


class RunReader:
    """Read a run folder, and read on when more was written.

    Args:
        folder: The run folder, or a file in it.
        max_groups: The most groups of steps to keep. See "Thinning" above.
        wait: Whether a folder without a run may get one later. Otherwise it is an error.

    Attributes:
        facts: The content of run.json.
        groups: The steps in order, added up in groups of `steps_per_group`. The last group may have fewer.
        repeated: The steps that were taken again after a restart, as they went the first time; None if there are none.
        num_events: How many events of each kind there are.

    Raises:
        ZeroEngineError: There is no run in the folder.
    """

    def __init__(self, folder: Path, max_groups: int = MAX_GROUPS, wait: bool = False) -> None:
        self.folder = folder.parent if folder.is_file() else folder
        self.facts: dict[str, Any] = {}
        self.groups: list[StepGroup] = []
        self.steps_per_group = 1
        self.repeated: StepGroup | None = None
        # Events with their numbers. Of frequent kinds, only each so many-th is kept beside the newest events.
        self._rare_events: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_EVENTS)
        self._frequent_events: list[tuple[int, dict[str, Any]]] = []
        self._newest_events: deque[tuple[int, dict[str, Any]]] = deque(maxlen=NEWEST_EVENTS)
        self.num_events: dict[str, int] = {}
        self._total: StepGroup | None = None
        self._max_groups = max_groups
        self._recent: deque[StepGroup] = deque(maxlen=RECENT_STEPS)
        self._steps, self._event_lines = GrowingLines(self.folder / STEPS), GrowingLines(self.folder / EVENTS)
        self._facts_time: int | None = None
        self._facts_problem = ""
        if not wait:
            check_folder(self.folder)
        steps = self.folder / STEPS
        size = steps.stat().st_size if steps.exists() else 0
        with progress(f"reading {self.folder.name}", size, shown=size > LONG_READ_BYTES and not wait) as report:
            self.read(report)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events, oldest first. Of a long run, some checkpoints and skips are left out."""
        numbered = dict([*self._rare_events, *self._frequent_events, *self._newest_events])
        return [numbered[number] for number in sorted(numbered)]

    @property
    def started(self) -> float | None:
        """When the run began, in Unix seconds. A restart replaces run.json, so earlier records count as well."""
        times = [self.facts.get("started"), *(event.get("time") for event in self.events[:1])]
        if self.total is not None:
            times.append(self.total.start)
        return min((float(moment) for moment in times if moment is not None), default=None)

    @property
    def total(self) -> StepGroup | None:
        """Every record added up; None before the first step."""
        if self._total is None and self.groups:
            self._total = merge_groups([*([self.repeated] if self.repeated else []), *self.groups])
        return self._total

    @property
    def recent(self) -> StepGroup | None:
        """The newest steps added up; None before the first step."""
        return merge_groups(self._recent) if self._recent else None

    @property
    def last(self) -> StepGroup | None:
        """The newest step; None before the first one."""
        return self._recent[-1] if self._recent else None

    def read(self, report: Report = ignore_progress) -> bool:
        """Read what is new, and return whether there was anything.

        Args:
            report: Called with the bytes of the steps that were read since its last call.
        """
        is_new = self._read_facts()
        for event in self._event_lines.read():
            is_new = True
            self._add_event(clean_event(event))
        for record in self._steps.read(report):
            is_new = True
            try:
                group = StepGroup.from_record(record)
            except (KeyError, TypeError, ValueError, OverflowError):
                self._steps.note_damaged()
                continue
            self._add(group)
        return is_new

    def _read_facts(self) -> bool:
        path = self.folder / RUN
        try:
            modified = path.stat().st_mtime_ns
            if modified == self._facts_time:
                return False
            self._facts_time = modified
            facts = json.loads(path.read_bytes())
        except FileNotFoundError:
            self._facts_problem = f"there is no {RUN}: the model, the units and the configuration are unknown"
            return False
        except (ValueError, RecursionError):
            facts = None
        if isinstance(facts, dict):
            self.facts, self._facts_problem = clean_facts(facts), ""
        else:
            self._facts_problem = f"{RUN} is damaged: the model, the units and the configuration are unknown"
        return True

    def _add_event(self, event: dict[str, Any]) -> None:
        kind, number = event["kind"], sum(self.num_events.values())
        self.num_events[kind] = self.num_events.get(kind, 0) + 1
        self._newest_events.append((number, event))
        if kind not in FREQUENT_EVENTS:
            self._rare_events.append((number, event))
            return
        self._frequent_events.append((number, event))
        if len(self._frequent_events) > MAX_EVENTS:
            # Evenly thinned out, so that a picture of the whole run has events everywhere.
            del self._frequent_events[1::2]

    def _add(self, step: StepGroup) -> None:
        self._total = None
        if self.groups and step.first_step <= self.groups[-1].last_step:
            self._drop_repeated(step.first_step)
        self._recent.append(step)
        if self.groups and self.groups[-1].num_steps < self.steps_per_group:
            self.groups[-1].merge(step)
            return
        # The step stays among the recent ones, so the group that others are merged into is a copy.
        self.groups.append(merge_groups([step]))
        if len(self.groups) > self._max_groups:
            for first, second in zip(self.groups[::2], self.groups[1::2], strict=False):
                first.merge(second)
            del self.groups[1::2]
            self.steps_per_group *= 2

    def _drop_repeated(self, step: int) -> None:
        """Drop the groups of steps that are taken again. A group that begins before `step` stays as it is."""
        dropped = [group for group in self.groups if group.first_step >= step]
        if dropped:
            del self.groups[-len(dropped) :]
            self.repeated = merge_groups([*([self.repeated] if self.repeated else []), *dropped])
        self._recent.clear()

    def state(self, now: float | None = None) -> str:
        """Return "running", "ended", "failed", "starting", or "silent" if nothing was written for long.

        Args:
            now: The time in Unix seconds (by default, that of this machine).
        """
        events = self.events
        for event in reversed(events):
            kind = event["kind"]
            if kind in ("end", "error"):
                return "ended" if kind == "end" else "failed"
            # A step or a restart after the error means that the run went on.
            if kind in ("start", "resume", "restart", "checkpoint"):
                break
        now = time.time() if now is None else now
        event_time = events[-1].get("time") if events else None
        times = [event_time, self.facts.get("started"), self.total.end if self.total else None]
        newest = max((t for t in times if t is not None), default=0.0)
        recent = self.recent
        step_seconds = recent.mean("seconds") if recent else None
        if now - newest > max(60.0, 10.0 * (step_seconds or 30.0)):
            return "silent"
        return "running" if self.total else "starting"

    def notices(self) -> list[str]:
        """Return sentences about what is missing, damaged or newer than this code knows."""
        notices = [self._facts_problem] if self._facts_problem else []
        written = self.facts.get("format", KNOWN_FORMAT)
        if written > KNOWN_FORMAT:
            by = self.facts.get("zeroengine", "a newer version")
            notices.append(
                f"the run folder has format {written}, written by zeroengine {by}, and this zeroengine knows format "
                f"{KNOWN_FORMAT}: figures may be missing. Update zeroengine to see all of them"
            )
        notices += [*self._steps.notices(), *self._event_lines.notices()]
        if self.total is None:
            notices.append("no step was recorded yet")
        return notices


def last_step(folder: Path) -> int:
    """Return the newest step of a run folder, or 0 if there is none."""
    for record in last_objects(folder / STEPS, 1):
        if isinstance(record.get("step"), int):
            return int(record["step"])
    return 0


def last_objects(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the objects of the last whole lines of a file, in order; only the end of the file is read.

    Args:
        path: The file; one that does not exist has no lines.
        count: The most lines.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - READ_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    objects: list[dict[str, Any]] = []
    # What follows the last line's end is not whole.
    for line in reversed(lines[:-1]):
        if len(objects) == count:
            break
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                objects.insert(0, value)
    return objects


def check_folder(folder: Path) -> None:
    """Check that the folder has a run.

    Raises:
        ZeroEngineError: It has none; the message names a folder with a run close by, if there is one.
    """
    if not folder.exists():
        raise ZeroEngineError(f"{folder}: there is no such folder. Write a run folder, as in zero-view runs/a")
    if any((folder / name).exists() for name in (RUN, STEPS, EVENTS)):
        return
    runs = sorted(str(path.parent) for path in folder.glob(f"*/{RUN}"))
    if runs:
        names = ", ".join(runs[:5]) + (", ..." if len(runs) > 5 else "")
        raise ZeroEngineError(f"{folder} has no run itself. Write one of {names}")
    raise ZeroEngineError(
        f"{folder} is no run folder: it has neither {RUN} nor {STEPS}. For a run to write one, {HOW_TO_WRITE}"
    )
