"""Log to Weights & Biases, as DeepSpeed's wandb does, online or offline."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from typing import Any

from zeroengine.config.sinks import WeightsAndBiases
from zeroengine.monitor.metrics import Metrics
from zeroengine.monitor.record import RunEvent, StepRecord

log = logging.getLogger("zeroengine")

EVENT = "zeroengine/event"
# The open sinks of all engines of this process.
_sinks: weakref.WeakSet[WandbSink] = weakref.WeakSet()


class WandbSink:
    """Logs to a run that no other engine logs to. Where the server cannot be used, the run is stored for `wandb sync`.

    Args:
        section: The section of the configuration.
        metrics: Names the numbers.
        run: What the run is, for the page of its configuration.
    """

    def __init__(self, section: WeightsAndBiases, metrics: Metrics, run: Mapping[str, Any]) -> None:
        # The import takes a second, and fails without the package.
        import wandb

        self._metrics, self._position = metrics, 0
        arguments: dict[str, Any] = {
            "project": section.project,
            "group": section.group,
            "entity": section.team,
            "config": dict(run),
            # wandb would return the run that is active. Where that is the user's, the first engine logs to it.
            "reinit": "create_new" if list(_sinks) else None,
        }
        _sinks.add(self)
        # The variable is the user's own choice, and wandb follows it.
        if "WANDB_MODE" in os.environ:
            self._run = wandb.init(**arguments)
            return
        reason = None
        # Without a key wandb would ask for one on the terminal, and fail where there is none.
        if not wandb.login(prompt=False, verify=False):
            reason = "there is no API key (wandb login, or WANDB_API_KEY)"
        else:
            try:
                self._run = wandb.init(**arguments)
            except Exception as error:
                reason = str(error).strip() or type(error).__name__
        if reason is not None:
            self._run = wandb.init(**arguments, mode="offline")
            log.warning("wandb: the run is stored in %s, for `wandb sync`: %s", self._run.dir, reason)

    def step(self, record: StepRecord) -> None:
        """Log the numbers of a step."""
        self._position = self._metrics.position(record)
        self._run.log(self._metrics.values(record), step=self._position)

    def event(self, event: RunEvent) -> None:
        """Log an event as text."""
        self._run.log({EVENT: f"step {event.step}: {event.kind}: {event.text}"}, step=self._position)

    def close(self) -> None:
        """Send what is buffered, and end the run."""
        _sinks.discard(self)
        self._run.finish()
