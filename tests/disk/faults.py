"""Failures of the disk library, which tests ask for."""

from __future__ import annotations

from zeroengine.ops import _aio_library as _aio

# The numbers of csrc/zeroengine_aio.h. An errno is positive.
FAULTS = {"none": 0, "short": -1, "empty": -2}


def set_fault(fault: str | int, first: int = 1, count: int = 1) -> None:
    """Make blocks of this process fail.

    Args:
        fault: "short" (half of the block is moved), "empty" (nothing is), an errno, or "none" to end all faults.
        first: The first block that fails, counted from 1 from this call on.
        count: The number of blocks that fail.
    """
    _aio.library().ze_aio_set_fault(FAULTS[fault] if isinstance(fault, str) else fault, first, count)
