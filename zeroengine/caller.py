"""What a caller is about to do with the value that a function returns."""

from __future__ import annotations

import dis
from types import FrameType


def unpacks_result(frame: FrameType) -> bool:
    """Return whether ``frame``, which waits for a call to return, unpacks the result into several names.

    That is what the statement ``first, second = function()`` does, and CPython compiles it to an UNPACK instruction
    directly after the call's. ``f_lasti`` is the call's own instruction or one of its inline cache entries, which
    ``dis`` leaves out (CPython 3.10 to 3.14).

    Args:
        frame: of the caller, such as ``sys._getframe(1)``.
    """
    following = (i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti)
    return next((i.opname.startswith("UNPACK_") for i in following), False)
