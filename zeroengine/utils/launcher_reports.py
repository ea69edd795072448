"""What a rank and the launcher that started it tell each other. This file needs no torch."""

from __future__ import annotations

import contextlib
import os

# The exit code (EX_TEMPFAIL of sysexits.h) of a rank that saved a checkpoint and ended because its time was over. The
# launcher should start it again. See `checkpoint/on_signal.py`.
RESTART_EXIT_CODE = 75
# This variable names the file by which a rank reports its first step.
STEP_FILE = "ZEROENGINE_STEP_FILE"
# This variable names the folder in memory that the launcher's process on this node removes when it ends.
SNAPSHOT_FOLDER = "ZEROENGINE_SNAPSHOT_FOLDER"
# The steps that an engine has taken (`step`), and those before its first step in this process (`resumed_step`). Where
# the script fails, worker.py writes them beside the error. Empty without an engine.
REPORTED_STEPS: dict[str, int] = {}


def report_step(step: int) -> None:
    """Note that so many steps were taken. The first call reports to zero-launch, if it started this process."""
    REPORTED_STEPS.setdefault("resumed_step", step - 1)
    # Of several engines the one that has taken the most steps says how far the round has come.
    REPORTED_STEPS["step"] = max(step, REPORTED_STEPS.get("step", 0))
    # The variable is removed, so that later steps cost one lookup and child processes do not report.
    path = os.environ.pop(STEP_FILE, None)
    if path is not None:
        # The folder no longer exists if zero-launch is ending this round.
        with contextlib.suppress(OSError):
            open(path, "w").close()
