"""The process of one rank as its node sees it, and the outcome of a run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from zeroengine.utils.launcher import RESTART_EXIT_CODE

STOP_POLL_INTERVAL_S = 0.02
# Counted from the first signal: a rank that ignores SIGINT is sent SIGTERM, and then SIGKILL.
SIGTERM_TIMEOUT_S = 1.0
SIGKILL_TIMEOUT_S = 3.0
# The seconds that the other ranks may run on after one has died without a reason.
PEER_FAILURE_TIMEOUT_S = 5.0
# The same after SIGKILL, which says itself why the rank died: what it was in the midst of would not explain it.
PEER_FAILURE_AFTER_KILL_S = 0.5
# A run ends after so many equal failures in a row.
MAX_EQUAL_FAILURES = 3


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed."""

    rank: int
    # `time.monotonic` of the exception. Without an exception, of the last moment when the process was seen running.
    time: float
    code: int  # the exit code as a shell counts: 128 + n for signal n
    summary: str = ""  # the exception in one line; empty if the rank left no reason
    text: str = ""  # its traceback, which nobody has printed yet
    host: str = ""  # the node's name, if there are several nodes
    step: int | None = None  # the steps that its engine had taken; None if it may have taken some without an engine
    resumed_step: int = 0  # those that it had taken before this round

    @property
    def label(self) -> str:
        """The rank's name in messages."""
        return f"rank {self.rank}" + (f" ({self.host})" if self.host else "")


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    failures: tuple[RankFailure, ...] = ()  # in order of time, without the ranks that were stopped for a failure
    stop_signal: signal.Signals | None = None  # the signal that ended the launcher
    node_losses: tuple[str, ...] = ()  # a sentence for each node that was lost before the run was over
    num_equal: int = 0  # the rounds in a row that have failed equally, see "Equal failures" in repeated_failures.py
    notices: tuple[str, ...] = ()  # a sentence about them, from the second one

    @property
    def is_final(self) -> bool:
        """Whether the ranks must not be started again here, however many restarts are left."""
        return self.stop_signal is not None or self.code == RESTART_EXIT_CODE or self.num_equal >= MAX_EQUAL_FAILURES

    @property
    def code(self) -> int:
        """The launcher's exit code."""
        if self.stop_signal is not None:
            return 128 + self.stop_signal
        # The first failure is the cause of the others. A run that only lost nodes has no exit code of a rank.
        return self.failures[0].code if self.failures else int(bool(self.node_losses))


@dataclass
class RankProcess:
    """The process of one rank. Its methods never reap the process: torch elastic does that."""

    rank: int
    pid: int
    failure_file: Path  # the worker writes its exception here, see worker.py
    code: int | None = None  # None while the process runs
    was_stopped: bool = False  # the launcher stopped it, so its exit code is no failure
    last_seen_running: float = field(default_factory=time.monotonic)

    @property
    def has_failed(self) -> bool:
        """Whether the rank failed by itself."""
        # The failure file may exist before the process has ended, and then the rank is failing already.
        return not self.was_stopped and (bool(self.code) or self.failure_file.exists())

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.code is None:
            # The time is taken before the look, so the process was certainly alive at that moment.
            now = time.monotonic()
            # WNOWAIT leaves the process as a zombie, which torch elastic reaps later.
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                self.last_seen_running = now
            else:
                self.code = end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status
        return self.code

    def stop(self, number: signal.Signals) -> None:
        """Send a signal to the worker and its children, unless the worker is failing by itself already."""
        # A rank that is writing its traceback is not interrupted, and only SIGKILL ends it if it hangs.
        if self.poll() is not None or (self.has_failed and number != signal.SIGKILL):
            return
        # A rank that had failed before the signal stays a failure of its own.
        self.was_stopped = self.was_stopped or not self.has_failed
        # torch elastic starts each worker in a session, and so in a process group, of its own.
        os.killpg(self.pid, number)

    def failure(self) -> RankFailure | None:
        """Return how the rank failed, or None if it did not or was stopped because another rank failed."""
        if not self.has_failed:
            return None
        if self.failure_file.exists():
            # The worker renames the file into place, so it is complete whenever it exists.
            return RankFailure(self.rank, **json.loads(self.failure_file.read_text()))
        return RankFailure(self.rank, self.last_seen_running, self.code or 0)


def peer_failure_timeout_s(code: int | None) -> float:
    """Return the seconds that the others may run on after a rank has ended with this exit code, without a reason."""
    return PEER_FAILURE_AFTER_KILL_S if code == 128 + signal.SIGKILL else PEER_FAILURE_TIMEOUT_S


def stop_ranks(processes: Iterable[RankProcess], number: signal.Signals = signal.SIGTERM) -> None:
    """End the processes and wait for them: by `number`, then by SIGTERM, and at last by SIGKILL."""
    processes, start = list(processes), time.monotonic()
    # The limits are counted from one common start, so many ranks end as fast as one.
    for next_signal, until in (
        (number, SIGTERM_TIMEOUT_S),
        (signal.SIGTERM, SIGKILL_TIMEOUT_S),
        (signal.SIGKILL, 2 * SIGKILL_TIMEOUT_S),
    ):
        for process in processes:
            process.stop(next_signal)
        while any(process.poll() is None for process in processes) and time.monotonic() < start + until:
            time.sleep(STOP_POLL_INTERVAL_S)
