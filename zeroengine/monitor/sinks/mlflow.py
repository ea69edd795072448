"""Log to MLflow: a server, a database or a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from zeroengine.config.sinks import MLflow
from zeroengine.monitor.metrics import Metrics
from zeroengine.monitor.record import RunEvent, StepRecord
from zeroengine.utils.flat_items import flat_items

# MLflow refuses longer values, and more of them in one call.
MAX_VALUE_LENGTH = 500
MAX_PARAMS = 100
MILLISECONDS = 1000
_NOT_ALLOWED = re.compile(r"[^\w\-. /:]")


class MLflowSink:
    """Logs to a run of its own.

    Args:
        section: The section of the configuration.
        metrics: Names the numbers.
        run: What the run is, for its parameters.
    """

    def __init__(self, section: MLflow, metrics: Metrics, run: Mapping[str, Any]) -> None:
        # The import takes a second, and fails without the package.
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metrics, self._metric_class = metrics, Metric
        uri = section.tracking_uri
        if uri is not None and urlsplit(uri).scheme in ("", "file"):
            # MLflow refuses folders unless this variable says that they are meant. The configuration says so.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = uri if uri.startswith("file:") else Path(uri).absolute().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(section.experiment)
        experiment_id = (
            self._client.create_experiment(section.experiment) if experiment is None else experiment.experiment_id
        )
        self._run_id = self._client.create_run(experiment_id).info.run_id
        params = [Param(_allowed(name), str(value)[:MAX_VALUE_LENGTH]) for name, value in flat_items(run)]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])

    def step(self, record: StepRecord) -> None:
        """Log the numbers of a step."""
        position, time = self._metrics.position(record), int(record.time * MILLISECONDS)
        values = self._metrics.values(record).items()
        metrics = [self._metric_class(_allowed(name), value, time, position) for name, value in values]
        self._client.log_batch(self._run_id, metrics=metrics)

    def event(self, event: RunEvent) -> None:
        """Set the tag of this kind of event to its text."""
        self._client.set_tag(self._run_id, f"zeroengine.{event.kind}", f"step {event.step}: {event.text}")

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id)


def _allowed(name: str) -> str:
    """Return the name with ``_`` for the characters that MLflow refuses."""
    return _NOT_ALLOWED.sub("_", name)
