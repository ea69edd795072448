"""Memory that was freed, and that glibc would keep."""

from __future__ import annotations

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Gives it back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
