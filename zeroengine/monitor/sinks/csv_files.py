"""Write CSV files, one for each metric, as DeepSpeed's csv_monitor does."""

from __future__ import annotations

import csv
import os
from typing import Any, TextIO

from zeroengine.monitor.metrics import Metrics
from zeroengine.monitor.record import RunEvent, StepRecord
from zeroengine.monitor.sinks.log_folder import LogFolder

EVENTS = "events"


class CSVSink:
    """Appends a line to ``<metric>.csv`` in a folder for each number, with ``/`` written as ``_``.

    A file begins with a line of titles. The first column, ``step``, counts samples. Events are in ``events.csv``.
    """

    def __init__(self, folder: LogFolder, metrics: Metrics) -> None:
        self._metrics, self._folder = metrics, folder
        self._files: dict[str, TextIO] = {}
        folder.path.mkdir(parents=True, exist_ok=True)

    def step(self, record: StepRecord) -> None:
        """Append the numbers of a step."""
        position = self._metrics.position(record)
        for name, value in self._metrics.values(record).items():
            self._append(name, ("step", name.rpartition("/")[2]), (position, value))

    def event(self, event: RunEvent) -> None:
        """Append an event."""
        row = (event.time, event.step, event.kind, event.text)
        self._append(EVENTS, ("time", "step", "kind", "text"), row)

    def _append(self, name: str, titles: tuple[str, ...], row: tuple[Any, ...]) -> None:
        file = self._files.get(name)
        if file is None:
            path = self._folder.path / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            file = self._files[name] = path.open("a", newline="")
            # A run that resumes appends to the files of the earlier run.
            if os.fstat(file.fileno()).st_size == 0:
                csv.writer(file).writerow(titles)
        csv.writer(file).writerow(row)
        file.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._folder.release()
