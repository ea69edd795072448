"""Show a progress bar if there is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from zeroengine.utils.byte_counter import call_every

# A report takes the amount done since its last call, in bytes unless it says otherwise.
Report = Callable[[int], None]
EVICTION_INTERVAL_BYTES = 64 << 20


def ignore_progress(amount: int) -> None:
    """Ignore the amount."""


def evicting(report: Report, evict: Callable[[], None]) -> Report:
    """Return a `report` that also calls `evict` at intervals, so that states on disk do not fill the memory."""
    count = call_every(EVICTION_INTERVAL_BYTES, evict)

    def report_and_evict(nbytes: int) -> None:
        report(nbytes)
        count(nbytes)

    return report_and_evict


@contextlib.contextmanager
def progress(description: str, total: int, shown: bool = True, *, in_bytes: bool = True) -> Iterator[Report]:
    """Show a progress bar on a terminal, and yield a function to be called with the amount done since its last call.

    Args:
        description: The label of the bar.
        total: The amount that is to be done.
        shown: False shows nothing, as on all ranks but the first.
        in_bytes: Whether amounts are bytes; otherwise they are counts.
    """
    # A log file would fill up with the characters that move the cursor.
    if not (shown and sys.stderr.isatty()):
        yield ignore_progress
        return
    # The import of rich takes a while, and most ranks show nothing.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    amount = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else ()
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)
