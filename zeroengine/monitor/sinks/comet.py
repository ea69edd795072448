"""Log to Comet, as DeepSpeed's comet does, online or offline."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from zeroengine.config.sinks import Comet
from zeroengine.monitor.metrics import Metrics
from zeroengine.monitor.record import RunEvent, StepRecord

log = logging.getLogger("zeroengine")


class CometSink:
    """Logs to one experiment. Where the server cannot be used, it is archived for `comet upload`.

    Args:
        section: The section of the configuration.
        metrics: Names the numbers.
        run: What the run is, for the page of its parameters.
    """

    def __init__(self, section: Comet, metrics: Metrics, run: Mapping[str, Any]) -> None:
        # The import takes a second, and fails without the package.
        import comet_ml

        self._metrics, self._position = metrics, 0
        self._interval = section.samples_log_interval
        self._last_positions: dict[str, int] = {}
        arguments = section.model_dump(include={"project", "workspace", "api_key", "experiment_key"})
        try:
            self._experiment = comet_ml.start(**arguments, online=section.online)
        except Exception as error:
            # With "online": true the user has decided, and the error stands.
            if section.online is not None:
                raise
            self._experiment = comet_ml.start(**arguments, online=False)
            log.warning("comet: the experiment is archived, for `comet upload`: %s", error)
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)
        self._experiment.log_parameters(dict(run), nested_support=True)

    def step(self, record: StepRecord) -> None:
        """Log the numbers of a step, each at most every ``samples_log_interval`` samples."""
        self._position = self._metrics.position(record)
        for name, value in self._metrics.values(record).items():
            last = self._last_positions.get(name)
            # A run that goes back to a checkpoint logs at once.
            if last is None or not 0 <= self._position - last < self._interval:
                self._last_positions[name] = self._position
                self._experiment.log_metric(name, value, step=self._position)

    def event(self, event: RunEvent) -> None:
        """Log an event as text."""
        self._experiment.log_text(f"step {event.step}: {event.kind}: {event.text}", step=self._position)

    def close(self) -> None:
        """Send what is buffered, and end the experiment."""
        self._experiment.end()
