"""Save a checkpoint and end the ranks when a signal announces the end of the job: `checkpoint.on_signal`.

Ranks get a signal at different moments, some perhaps never, and all must save after the same step: see "Agreement
without waiting" in `agreement`.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import weakref
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from zeroengine.checkpoint.agreement import StepAgreement
from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.comm.group import Group
from zeroengine.config import Config
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.files import checked_path
from zeroengine.utils.launcher import RESTART_EXIT_CODE
from zeroengine.utils.process_finalizer import finalize

log = logging.getLogger("zeroengine")
# So many seconds lie between two all-reduces, where steps are shorter.
INTERVAL_S = 1.0
# The instance that listens in this process.
_listeners: weakref.WeakSet[SaveOnSignal] = weakref.WeakSet()


class SaveOnSignal:
    """Listens for the signal on one rank. All ranks construct, query and close it together.

    Args:
        config: A configuration that names a signal and a folder under `checkpoint`.
        group: All ranks.

    Attributes:
        directory: The folder that they save in.

    Raises:
        ZeroEngineError: On every rank; the folder cannot be made, or this thread or process cannot listen.
    """

    def __init__(self, config: Config, group: Group) -> None:
        self._group = group
        self._signal = signal.Signals[str(config.checkpoint.on_signal)]
        # The checks concern one process only. All ranks raise together, since they would otherwise wait for each other
        # below.
        with group.collective_errors("to initialize"):
            self.directory = checked_path(config.checkpoint.directory, "checkpoint.directory")
            self._check()
            if group.rank == 0:
                # When the signal comes it is too late for an error.
                with as_checkpoint_errors(f"checkpoint.directory {self.directory}: cannot be made a folder"):
                    Path(self.directory).mkdir(parents=True, exist_ok=True)
        self._agreement = StepAgreement(group, "agree on a signal", INTERVAL_S)
        # The handler is installed last, when everything that it needs exists. It keeps no engine alive.
        self._received, previous = threading.Event(), signal.getsignal(self._signal)
        handler = partial(_handle, self._received, previous)
        signal.signal(self._signal, handler)
        # An engine that is not closed puts the previous handler back when it is deleted, or when the process exits.
        self._stop_listening = finalize(self, _restore_handler, self._signal, handler, previous)
        _listeners.add(self)

    def _check(self) -> None:
        # Only the main thread runs Python's signal handlers, and only it may install them.
        if threading.current_thread() is not threading.main_thread():
            raise ZeroEngineError(
                "checkpoint.on_signal: Python hears signals in its main thread. Call initialize() there, or write "
                '"on_signal": null and save in a handler of your own.'
            )
        # The handler ends the process after its own save, so a second engine would never get to save.
        if list(_listeners):
            raise ZeroEngineError(
                "checkpoint.on_signal: another engine of this process saves at a signal, and then ends the process. "
                'Close that engine first; or write "on_signal": null for both, and save both yourself.'
            )

    def is_due(self) -> bool:
        """Return whether the ranks save now, at the end of a step; the same answer on all ranks."""
        return self._agreement.end_step(self._received.is_set())

    def exit(self, num_updates: int) -> NoReturn:
        """End this rank, whose checkpoint is saved, with an exit code that asks for a restart.

        Args:
            num_updates: The number of updates that the checkpoint holds.

        Raises:
            SystemExit: Always.
        """
        if self._group.rank == 0:
            log.warning(
                "%s: saved after step %d in %s. The ranks end with exit code %d, to be started again",
                self._signal.name,
                num_updates,
                self.directory,
                RESTART_EXIT_CODE,
            )
        # SystemExit lets `finally` blocks and exit handlers run, and the exit code asks zero-launch for another round.
        raise SystemExit(RESTART_EXIT_CODE)

    def close(self) -> None:
        """Put the signal's previous handler back."""
        _listeners.discard(self)
        self._stop_listening()
        self._agreement.close()


def _handle(received: threading.Event, previous: Any, signum: int, frame: FrameType | None) -> None:
    # The handler only sets a flag. It may interrupt any line, and a collective here would break the ranks' order.
    received.set()
    # Other code, such as a launcher's own handler, goes on hearing the signal.
    if callable(previous):
        previous(signum, frame)


def _restore_handler(number: signal.Signals, handler: Any, previous: Any) -> None:
    # A handler that somebody installed since then stays. The garbage collector may run in any thread, and only the main
    # thread may install one.
    if signal.getsignal(number) is handler:
        with contextlib.suppress(ValueError):
            signal.signal(number, previous)
