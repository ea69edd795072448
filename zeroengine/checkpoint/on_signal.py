"""Save a checkpoint and end the ranks when a signal announces the end of the job: `checkpoint.on_signal`.

[Note: Agreement on a signal]
Ranks get a signal at different moments, some perhaps never, and all must save after the same step. At the end of some
steps every rank begins an all-reduce of whether it has had the signal, and reads the sum at the end of the step after
that. So all ranks learn at the same step that one of them had the signal. The all-reduce travels over Gloo beside the
step in between, and nothing waits for it, unless a rank is a whole step behind. Short steps need no all-reduce each:
rank 0, which measures how long they take, adds to the sum how many steps later the next one begins.
"""

from __future__ import annotations

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

from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.comm.group import Group
from zeroengine.config import Config
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.launcher_reports import RESTART_EXIT_CODE
from zeroengine.utils.paths import checked_path
from zeroengine.utils.process_finalizer import exits_with_error, finalize
from zeroengine.utils.process_groups import destroy_group, leave_to_threads

log = logging.getLogger("zeroengine")
# So many seconds lie between two all-reduces, where steps are shorter.
INTERVAL_S = 1.0
# At most so many steps lie between two all-reduces, since later steps may take longer.
MAX_STEPS = 100
# At the end, the other ranks have so long to reach the end of their last step.
LAST_REDUCE_TIMEOUT = timedelta(seconds=5)


class SavingEngine(Protocol):
    """The part of an engine that this module uses."""

    global_steps: int

    def save_checkpoint(self, directory: str) -> None:
        """Save a checkpoint in the folder `directory`."""

    def wait_for_checkpoint(self) -> None:
        """Return when the checkpoint is on the disk."""


class SaveOnSignal:
    """Listens for the signal on one rank. All ranks construct, query and close it together.

    Args:
        config: A configuration that names a signal and a folder under `checkpoint`.
        group: All ranks.

    Raises:
        ZeroEngineError: On every rank; the folder cannot be made, or this thread or process cannot listen.
    """

    # This is the instance that listens in this process.
    _listener: SaveOnSignal | None = None

    def __init__(self, config: Config, group: Group) -> None:
        self._group, self._received = group, False
        self._signal = signal.Signals[str(config.checkpoint.on_signal)]
        # The all-reduce under way: the number of ranks that have the signal, and the steps to the next all-reduce.
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._steps_to_reduce = 1
        self._steps_since_reduce = 1
        self._last_reduce_time = time.monotonic()
        # The checks concern one process only. All ranks raise together, since they would otherwise wait for each other
        # below.
        with group.collective_errors("to initialize"):
            self._directory = checked_path(config.checkpoint.directory, "checkpoint.directory")
            self._check()
            if group.rank == 0:
                # When the signal comes it is too late for an error.
                with as_checkpoint_errors(f"checkpoint.directory {self._directory}: cannot be made a folder"):
                    Path(self._directory).mkdir(parents=True, exist_ok=True)
        # One rank alone needs no agreement, and the `fake` group has no other processes.
        is_alone = not group.has_peers
        self._gloo_group = None if is_alone else group.new_group("gloo")
        # The handler is installed last, when everything that it needs exists.
        self._previous_handler = signal.signal(self._signal, self._handle)
        SaveOnSignal._listener = self
        # A script may end without closing the engine. Other ranks still wait for this rank's part of the all-reduce.
        self._end_group = finalize(SaveOnSignal, self._finish_reduce)

    def _check(self) -> None:
        # Only the main thread runs Python's signal handlers, and only it may install them.
        if threading.current_thread() is not threading.main_thread():
            raise ZeroEngineError(
                "checkpoint.on_signal: Python hears signals in its main thread. Call initialize() there, or write "
                '"on_signal": null and save in a handler of your own.'
            )
        # The handler ends the process after its own save, so a second engine would never get to save.
        if SaveOnSignal._listener is not None:
            raise ZeroEngineError(
                "checkpoint.on_signal: another engine of this process saves at a signal, and then ends the process. "
                'Close that engine first; or write "on_signal": null for both, and save both yourself.'
            )

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # The handler only sets a flag. It may interrupt any line, and a collective here would break the ranks' order.
        self._received = True
        # Other code, such as a launcher's own handler, goes on hearing the signal.
        if callable(self._previous_handler):
            self._previous_handler(signum, frame)

    def is_due(self) -> bool:
        """Return whether the ranks save now, at the end of a step; the same answer on all ranks."""
        if self._gloo_group is None:
            return self._received
        # The all-reduce began a step ago, so its result is usually there and this returns at once.
        if self._pending is not None:
            work, values = self._pending
            with self._group.long_wait("agree on a signal"):
                work.wait()
            self._pending = None
            received, self._steps_to_reduce = values.tolist()
            if received:
                return True
        self._steps_to_reduce -= 1
        self._steps_since_reduce += 1
        if self._steps_to_reduce == 0:
            # Only rank 0 puts in a number, so the sum is its number. Ranks that measured for themselves would drift
            # apart.
            steps = self._steps_per_interval() if self._group.rank == 0 else 0
            values = torch.tensor([int(self._received), steps], device="cpu")
            work = dist.all_reduce(values, group=self._gloo_group, async_op=True)
            assert work is not None
            self._pending = (work, values)
        return False

    def _steps_per_interval(self) -> int:
        """Return the number of steps in INTERVAL_S, by the time of those since the last all-reduce."""
        now = time.monotonic()
        per_second = self._steps_since_reduce / max(now - self._last_reduce_time, 1e-9)
        self._steps_since_reduce, self._last_reduce_time = 0, now
        # The count starts at one or more. From zero it would be decremented below zero and never reach it again.
        return max(1, min(MAX_STEPS, int(per_second * INTERVAL_S)))

    def save_and_exit(self, engine: SavingEngine) -> None:
        """Save, and end this rank with an exit code that asks for a restart.

        Raises:
            CheckpointError: On every rank; there is no such checkpoint then.
            SystemExit: The checkpoint is saved.
        """
        engine.save_checkpoint(self._directory)
        # The process ends next, and a save beside training would be cut off.
        engine.wait_for_checkpoint()
        if self._group.rank == 0:
            log.warning(
                "%s: saved after step %d in %s. The ranks end with exit code %d, to be started again",
                self._signal.name,
                engine.global_steps,
                self._directory,
                RESTART_EXIT_CODE,
            )
        # SystemExit lets `finally` blocks and exit handlers run, and the exit code asks zero-launch for another round.
        raise SystemExit(RESTART_EXIT_CODE)

    def close(self) -> None:
        """Put the signal's previous handler back."""
        if SaveOnSignal._listener is self:
            SaveOnSignal._listener = None
            # A handler that somebody installed since then stays.
            if signal.getsignal(self._signal) == self._handle:
                signal.signal(self._signal, self._previous_handler)
        self._end_group()

    def _finish_reduce(self) -> None:
        """Wait for the all-reduce under way, since other ranks need this one; not for long, as one may have died."""
        pending, self._pending = self._pending, None
        group, self._gloo_group = self._gloo_group, None
        if pending is not None and group is not None:
            work, values = pending
            # After an error other ranks may never come to the all-reduce.
            if not exits_with_error():
                with contextlib.suppress(RuntimeError):
                    work.wait(LAST_REDUCE_TIMEOUT)
            if not work.is_completed():
                leave_to_threads(group, values)
                return
        if group is not None:
            destroy_group(group)
