"""Show a progress bar, where there is a terminal to show it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

# A report takes the amount done since its last call, in bytes where nothing else is said.
Report = Callable[[int], None]


def ignore_progress(amount: int) -> None:
    """Ignore what is reported."""


def every_64_mib(action: Callable[[], None]) -> Report:
    """Return a function that counts bytes, and calls `action` whenever another 64 MiB have come together."""
    pending_bytes = 0

    def count(nbytes: int) -> None:
        nonlocal pending_bytes
        pending_bytes += nbytes
        if pending_bytes >= 64 << 20:
            pending_bytes = 0
            action()

    return count


def evicting(report: Report, evict: Callable[[], None]) -> Report:
    """Return a `report` that also calls `evict` every 64 MiB, so that states on disk do not fill the memory."""
    count = every_64_mib(evict)

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
