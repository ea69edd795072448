"""One rank's process as its node sees it: running, ended, stopped, and how it failed; and how a run ended."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from zeroengine.utils.launcher_environment import START_AGAIN

TICK = 0.02  # seconds between two looks while ranks are being stopped
GRACE = 3.0  # seconds after which a rank that is still there is sent SIGKILL
HEARING = 5.0  # seconds that the other ranks may run on after one has died without a word
INSIST = 1.0  # seconds after which a rank that did not heed SIGINT is sent SIGTERM


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    rank: int
    time: float  # `time.monotonic` of the exception; where there was none, when the process was last seen alive
    code: int  # as a shell counts: 128 + n for signal n
    summary: str = ""  # the exception in one line
    text: str = ""  # its traceback, which nobody has printed yet
    host: str = ""  # where there are several

    @property
    def who(self) -> str:
        return f"rank {self.rank}" + (f" ({self.host})" if self.host else "")

    @property
    def explained(self) -> bool:
        """Whether it left word why."""
        return bool(self.summary)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    failures: tuple[Failure, ...] = ()  # the first to fail first, without the ranks that were stopped for it
    interrupted: signal.Signals | None = None  # the signal that ended the launcher
    lost: tuple[str, ...] = ()  # a sentence for each node that left before the run was over

    @property
    def is_final(self) -> bool:
        """Whether the ranks are not to be started again here, however many restarts are left."""
        return self.interrupted is not None or self.code == START_AGAIN

    @property
    def code(self) -> int:
        """The launcher's exit code."""
        if self.interrupted is not None:
            return 128 + self.interrupted
        return self.failures[0].code if self.failures else int(bool(self.lost))


@dataclass
class RankProcess:
    """A worker. Looking at it never reaps it: that is left to torch elastic."""

    rank: int
    pid: int
    failure_file: Path  # where the worker leaves word, see worker.py
    code: int | None = None  # None while it runs
    stopped: bool = False  # by us, so what it says about its end is no news
    seen: float = field(default_factory=time.monotonic)  # when it was last seen running

    @property
    def failed(self) -> bool:
        return not self.stopped and (bool(self.code) or self.failure_file.exists())

    @property
    def explained(self) -> bool:
        """Whether it has failed and left word why."""
        return self.failed and self.failure_file.exists()

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.code is None:
            now = time.monotonic()
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                self.seen = now
            else:
                self.code = end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status
        return self.code

    def stop(self, number: signal.Signals) -> None:
        """Send a signal to the worker and its children. One that is failing by itself may finish with that."""
        if self.poll() is not None or (self.failed and number != signal.SIGKILL):
            return
        self.stopped = self.stopped or not self.failed
        os.killpg(self.pid, number)

    def failure(self) -> Failure | None:
        """How it failed; None where it did not, or was stopped for another rank's failure."""
        if not self.failed:
            return None
        if self.failure_file.exists():
            return Failure(self.rank, **json.loads(self.failure_file.read_text()))
        return Failure(self.rank, self.seen, self.code or 0)


def stop_all(processes: Iterable[RankProcess], number: signal.Signals = signal.SIGTERM) -> None:
    """End the processes: by the signal given, soon by SIGTERM, and by SIGKILL when GRACE is over."""
    processes, start = list(processes), time.monotonic()
    for send, until in ((number, INSIST), (signal.SIGTERM, GRACE), (signal.SIGKILL, 2 * GRACE)):
        for process in processes:
            process.stop(send)
        while any(process.poll() is None for process in processes) and time.monotonic() < start + until:
            time.sleep(TICK)
