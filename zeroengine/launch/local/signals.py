"""Signals that tell the ranks something rather than end them: SIGUSR1 and SIGUSR2 are passed on to every rank.

Slurm sends one before a job's time is over, where `--signal` asks for it: to the batch script, which is the launcher,
or to the steps, which are the nodes' agents. Either way each rank gets it, the process of the script alone. What the
ranks do then is theirs to say; without a handler it ends them, as it ends any process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def passed_on(tell: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Within, call `tell` with each such signal that this process gets. For the main thread."""
    handlers = {number: signal.getsignal(number) for number in PASSED_ON}
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: tell(signal.Signals(number)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def ignore() -> None:
    """In a process that passes nothing on yet: a signal that is not for it must not end it."""
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes of this node that may have ended. Their helpers do not get it."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
