"""Save a checkpoint and end the ranks when a signal announces the end of the job: `checkpoint.on_signal`.

[Note: Agreement on a signal]
Ranks get a signal at different moments, some perhaps never, and all must save after the same step. At the end of some
steps every rank begins a sum over ranks of whether it has had the signal, and takes it in at the end of the step after
that. So all ranks learn at the same step that one of them had the signal. The sum travels over Gloo beside the step in
between, and nothing waits for it, unless a rank is a whole step behind. Short steps need no sum each: rank 0, which
knows how long they take, says in the sum how many steps later the next one begins.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from zeroengine.comm.group import Group
from zeroengine.config import Config
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.utils.launcher_environment import RESTART_EXIT_CODE
from zeroengine.utils.paths import checked_path

log = logging.getLogger("zeroengine")
EVERY_S = 1.0  # seconds between two sums, where steps are shorter
MOST_STEPS = 100  # between two sums: steps may take longer from now on
LAST_SUM = timedelta(seconds=5)  # for the other ranks to come to the end of the last step


class SavingEngine(Protocol):
    """What an engine does for this module."""

    global_steps: int

    def save_checkpoint(self, directory: str) -> None: ...
    def wait_for_checkpoint(self) -> None: ...


class SaveOnSignal:
    """Listens for the signal on one rank. Made, closed and asked at the end of each step on all ranks together.

    Args:
        config: names a signal and a folder under ``checkpoint``.

    Raises:
        ZeroEngineError: on every rank; the folder cannot be made, or this thread or process cannot listen.
    """

    _listening: SaveOnSignal | None = None  # of this process

    def __init__(self, config: Config, group: Group) -> None:
        self._group, self._received = group, False
        self._number = signal.Signals[str(config.checkpoint.on_signal)]
        self._sum: tuple[dist.Work, torch.Tensor] | None = None  # of how many have had it; steps to the next sum
        self._steps_to_sum = self._steps = 1
        self._began = time.monotonic()  # when the last sum did, `_steps` before
        with group.collective_errors("to initialize"):
            self._directory = checked_path(config.checkpoint.directory, "checkpoint.directory")
            self._check()
            if group.rank == 0:
                self._make_directory()
        alone = group.world_size == 1 or group.backend == "fake"
        self._gloo = None if alone else group.new_group("gloo")
        self._previous = signal.signal(self._number, self._handle)
        SaveOnSignal._listening = self
        atexit.register(self._finish_sum)

    def _check(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ZeroEngineError(
                "checkpoint.on_signal: Python hears signals in its main thread. Call initialize() there, or write "
                '"on_signal": null and save in a handler of your own.'
            )
        if SaveOnSignal._listening is not None:
            raise ZeroEngineError(
                "checkpoint.on_signal: another engine of this process saves at a signal, and then ends the process. "
                'Close that engine first; or write "on_signal": null for both, and save both yourself.'
            )

    def _make_directory(self) -> None:
        """Find out now, rather than when the time is over, whether the folder can be had."""
        try:
            Path(self._directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.directory {self._directory}: cannot be made a folder ({error.strerror})"
            ) from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        if callable(self._previous):
            self._previous(number, frame)

    def is_due(self) -> bool:
        """Return whether the ranks save now. Called at the end of each step; the same answer on all ranks."""
        if self._gloo is None:
            return self._received
        if self._sum is not None:
            work, values = self._sum
            with self._group.long_wait("agree on a signal"):
                work.wait()
            self._sum = None
            received, self._steps_to_sum = values.tolist()
            if received:
                return True
        self._steps_to_sum -= 1
        self._steps += 1
        if self._steps_to_sum == 0:
            steps = self._steps_between_sums() if self._group.rank == 0 else 0
            values = torch.tensor([int(self._received), steps], device="cpu")
            work = dist.all_reduce(values, group=self._gloo, async_op=True)
            assert work is not None
            self._sum = (work, values)
        return False

    def _steps_between_sums(self) -> int:
        """Return how many steps take EVERY_S, by those since the last sum."""
        now = time.monotonic()
        per_second = self._steps / max(now - self._began, 1e-9)
        self._steps, self._began = 0, now
        return max(1, min(MOST_STEPS, int(per_second * EVERY_S)))

    def save_and_exit(self, engine: SavingEngine) -> None:
        """Save, and end this rank with an exit code that says so.

        Raises:
            CheckpointError: on every rank; there is no such checkpoint then.
            SystemExit: the checkpoint is there.
        """
        engine.save_checkpoint(self._directory)
        engine.wait_for_checkpoint()
        if self._group.rank == 0:
            log.warning(
                "%s: saved after step %d in %s. The ranks end with exit code %d, to be started again",
                self._number.name,
                engine.global_steps,
                self._directory,
                RESTART_EXIT_CODE,
            )
        raise SystemExit(RESTART_EXIT_CODE)

    def close(self) -> None:
        """Leave the signal to whoever had it before."""
        if SaveOnSignal._listening is self:
            SaveOnSignal._listening = None
            if signal.getsignal(self._number) == self._handle:
                signal.signal(self._number, self._previous)
        self._finish_sum()
        atexit.unregister(self._finish_sum)

    def _finish_sum(self) -> None:
        """Let the last sum end before the process does: others wait for it. Not for long, as one may be gone."""
        (work, _), self._sum = self._sum or (None, None), None
        if work is not None:
            with contextlib.suppress(RuntimeError):
                work.wait(LAST_SUM)
