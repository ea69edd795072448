"""Write event files of TensorBoard, as DeepSpeed's tensorboard does."""

from __future__ import annotations

from typing import Any

from zeroengine.monitor.metrics import Metrics
from zeroengine.monitor.record import RunEvent, StepRecord
from zeroengine.monitor.sinks.log_folder import LogFolder

# A reader sees numbers that are at most so old.
FLUSH_SECONDS = 10


class TensorBoardSink:
    """Writes scalars to a folder, and events as texts."""

    def __init__(self, folder: LogFolder, metrics: Metrics) -> None:
        # The import takes a second, and fails without the package.
        from torch.utils.tensorboard import SummaryWriter

        self._writer_class, self._metrics = SummaryWriter, metrics
        self._folder = folder
        self._writer: Any = None
        self._position = 0
        self._events: list[RunEvent] = []
        folder.path.mkdir(parents=True, exist_ok=True)

    def step(self, record: StepRecord) -> None:
        """Write the numbers of a step."""
        self._position = self._metrics.position(record)
        if self._writer is None:
            # If the run has gone back to a checkpoint, this hides what an earlier run wrote beyond it.
            self._writer = self._writer_class(
                str(self._folder.path), purge_step=self._position, flush_secs=FLUSH_SECONDS
            )
            self._write_events()
        for name, value in self._metrics.values(record).items():
            self._writer.add_scalar(name, value, self._position)

    def event(self, event: RunEvent) -> None:
        """Write an event, once there is a step."""
        self._events.append(event)
        if self._writer is not None:
            self._write_events()

    def _write_events(self) -> None:
        for event in self._events:
            text = f"step {event.step}: {event.text}"
            self._writer.add_text(f"zeroengine/{event.kind}", text, self._position, walltime=event.time)
        self._events.clear()

    def close(self) -> None:
        """Write what is buffered."""
        if self._writer is None and self._events:
            self._writer = self._writer_class(str(self._folder.path))
            self._write_events()
        if self._writer is not None:
            self._writer.close()
        self._folder.release()
