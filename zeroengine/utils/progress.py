"""Show a progress bar if there is a terminal, and otherwise print a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from zeroengine.utils.formats import format_byte_size, format_duration


def call_every(interval_bytes: int, action: Callable[[], None]) -> Callable[[int], None]:
    """Return a function that counts bytes, and calls `action` each time it has counted `interval_bytes` more."""
    pending_bytes = 0

    def count(nbytes: int) -> None:
        """Count bytes, and call the action where they are enough."""
        nonlocal pending_bytes
        pending_bytes += nbytes
        if pending_bytes >= interval_bytes:
            pending_bytes = 0
            action()

    return count


# A report takes the amount done since its last call, in bytes unless it says otherwise.
Report = Callable[[int], None]
EVICTION_INTERVAL_BYTES = 64 << 20
# Without a terminal, work that takes longer than the first figure prints a line every so many seconds.
FIRST_LINE_S, LINE_INTERVAL_S = 10.0, 30.0


def ignore_progress(amount: int) -> None:
    """Ignore the amount."""


def evicting(report: Report, evict: Callable[[], None]) -> Report:
    """Return a `report` that also calls `evict` at intervals, so that states on disk do not fill the memory."""
    count = call_every(EVICTION_INTERVAL_BYTES, evict)

    def report_and_evict(nbytes: int) -> None:
        report(nbytes)
        count(nbytes)

    return report_and_evict


class ProgressLines:
    """Print how far long work is, in whole lines.

    Args:
        description: What is done.
        total: The amount that is to be done.
        in_bytes: Whether amounts are bytes; otherwise they are counts.
    """

    def __init__(self, description: str, total: int, in_bytes: bool) -> None:
        self._description, self._total, self._in_bytes = description, total, in_bytes
        self._done, self._start = 0, time.monotonic()
        self._next_line = self._start + FIRST_LINE_S

    def advance(self, amount: int) -> None:
        """Add to the amount that is done."""
        self._done += amount
        now = time.monotonic()
        if now < self._next_line or not 0 < self._done < self._total:
            return
        self._next_line = now + LINE_INTERVAL_S
        remaining = (now - self._start) * (self._total - self._done) / self._done
        amounts = map(format_byte_size if self._in_bytes else str, (self._done, self._total))
        share = f"{100 * self._done / self._total:.0f} % ({' of '.join(amounts)})"
        print(f"{self._description}: {share}, {format_duration(round(remaining))} to go", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(description: str, total: int, shown: bool = True, *, in_bytes: bool = True) -> Iterator[Report]:
    """Show how far some work is, and yield a function to be called with the amount done since its last call.

    A terminal has a progress bar. Otherwise long work prints a line every 30 seconds.

    Args:
        description: The label of the bar.
        total: The amount that is to be done.
        shown: False shows nothing, as on all ranks but the first.
        in_bytes: Whether amounts are bytes; otherwise they are counts.
    """
    if not shown:
        yield ignore_progress
        return
    # A log file would fill up with the characters that move the cursor.
    if not sys.stderr.isatty():
        yield ProgressLines(description, total, in_bytes).advance
        return
    # The import of rich takes a while, and most ranks show nothing.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    amount = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else ()
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)
