"""Return memory that was freed, and that glibc's allocator would keep, to the system."""

from __future__ import annotations

import contextlib
import ctypes

# One trim walks the whole heap, which takes some milliseconds, so it waits until this many bytes were freed.
TRIM_THRESHOLD_BYTES = 1 << 26


def trim_heap() -> None:
    """Call glibc's ``malloc_trim``. Do nothing where the C library has none."""
    # Only glibc has this function. Other C libraries and systems go without it.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class MallocTrimmer:
    """Trim the heap whenever another ``TRIM_THRESHOLD_BYTES`` were freed."""

    def __init__(self) -> None:
        self._nbytes = 0

    def add_freed(self, nbytes: int) -> None:
        """Count ``nbytes`` that were freed, and trim if enough have come together."""
        self._nbytes += nbytes
        if self._nbytes >= TRIM_THRESHOLD_BYTES:
            trim_heap()
            self._nbytes = 0
