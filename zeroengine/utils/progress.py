"""A progress bar of bytes, where there is a terminal to show it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

RELEASE_BYTES = 1 << 26


def releasing(report: Callable[[int], None], evict: Callable[[], None]) -> Callable[[int], None]:
    """``report`` that calls ``evict`` every 64 MiB, so that states on disk do not fill the memory as they pass."""
    since = 0

    def both(done: int) -> None:
        nonlocal since
        report(done)
        since += done
        if since >= RELEASE_BYTES:
            since = 0
            evict()

    return both


@contextlib.contextmanager
def progress(
    description: str, total: int, shown: bool = True, *, in_bytes: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, and yield a function to be called with the amount done since its last call.

    Args:
        description: The label of the bar.
        total: The amount that is to be done.
        shown: False to show nothing.
        in_bytes: Whether amounts are bytes; otherwise they are counts.
    """
    if not (shown and sys.stderr.isatty()):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    amount = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else ()
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)
