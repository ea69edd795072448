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
def progress(what: str, total: int, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Gives a function to be called with the bytes done since its last call."""
    if not (shown and sys.stderr.isatty()):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
