"""Give freed memory that glibc's allocator would keep back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def trim_heap() -> None:
    """Call glibc's ``malloc_trim``, which walks the whole heap in some milliseconds.

    Do nothing where the C library has none.
    """
    # Only glibc has this function.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
