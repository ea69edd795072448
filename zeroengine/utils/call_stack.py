"""Find the calls of a function among the calls in progress of this thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType


def calls_in_progress(code: CodeType) -> Iterator[FrameType]:
    """Yield the frames of this thread that run ``code``, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back
