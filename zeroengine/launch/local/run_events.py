"""What the launcher adds to the events of a run folder: restarts, lost nodes, and how a round of ranks ended."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from zeroengine.errors import LaunchError
from zeroengine.launch.local.failure_report import describe_exit_code
from zeroengine.launch.local.rank import RunOutcome
from zeroengine.monitor.record import EventKind, RunEvent
from zeroengine.monitor.run_folder import append_event
from zeroengine.utils.files import EVENTS
from zeroengine.utils.launcher import RESTART_EXIT_CODE
from zeroengine.view.run_reader import last_objects, last_step

# An exception's message may be long, and an event is one line.
MAX_SUMMARY_CHARACTERS = 300


class LauncherEvents:
    """Append the launcher's events to a run folder.

    Args:
        folder: The run folder; None writes nothing. It is made if it is absent.

    Raises:
        LaunchError: The folder cannot be made.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(
                    f"--run-folder {folder}: cannot be made a folder ({error.strerror}). Write another one"
                ) from None

    def append(self, kind: EventKind, text: str) -> None:
        """Append an event of this moment, after the newest step."""
        if self._folder is None:
            return
        # A full disk must not end the run.
        with contextlib.suppress(OSError):
            append_event(self._folder, RunEvent(time.time(), last_step(self._folder), kind, text))

    def append_outcome(self, outcome: RunOutcome) -> None:
        """Append how a round ended, unless the ranks have said so themselves."""
        if outcome.stop_signal is not None:
            self.append("end", f"stopped by {outcome.stop_signal.name}")
        elif outcome.code == RESTART_EXIT_CODE:
            self.append("end", "the ranks have ended to be started again")
        elif outcome.failures:
            first = outcome.failures[0]
            reason = first.summary.partition("\n")[0][:MAX_SUMMARY_CHARACTERS] or describe_exit_code(first.code)
            self.append("error", ". ".join([f"{first.label} failed: {reason}", *outcome.notices]))
        elif self._folder is not None and not outcome.node_losses:
            # A script that never closes its engine has written no end.
            with contextlib.suppress(OSError):
                newest = last_objects(self._folder / EVENTS, 1)
                if newest and newest[0].get("kind") != "end":
                    self.append("end", "all ranks have ended")
