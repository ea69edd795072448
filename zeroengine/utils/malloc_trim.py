"""Memory that was freed, and that glibc would keep."""

from __future__ import annotations

import contextlib
import ctypes

PATIENCE = 1 << 26  # bytes: a look through the heap takes some milliseconds


def return_freed_memory() -> None:
    """Gives it back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Freed:
    """Gives it back now and then, as more is freed."""

    def __init__(self) -> None:
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes >= PATIENCE:
            return_freed_memory()
            self._nbytes = 0
