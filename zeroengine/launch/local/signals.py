"""The signals that a launcher handles, and one way to set and restore their handlers.

[Note: Forwarded signals]
SIGUSR1 and SIGUSR2 tell the ranks something instead of ending them. Slurm sends one before a job's time is over, if
`--signal` asks for it: to the batch script, which is the launcher, or to the steps, which are the nodes' agents. In
either case every rank receives it, and only the process of the script itself. The script decides what to do then;
without a handler the signal ends the rank, as it ends any process.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def signal_handlers(
    numbers: Iterable[signal.Signals], handler: Callable[[signal.Signals], None] | None = None
) -> Iterator[None]:
    """Call `handler` with each of these signals within the block, and restore the earlier handlers after it.

    Only the main thread may set handlers.

    Args:
        numbers: The signals.
        handler: Receives the signal. None leaves the handlers as they are: the block may change them itself.
    """
    previous = {number: signal.getsignal(number) for number in numbers}
    if handler is not None:
        for number in previous:
            signal.signal(number, lambda number, _: handler(signal.Signals(number)))
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


def ignore_signals(numbers: Iterable[signal.Signals]) -> None:
    """Ignore these signals from now on."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
