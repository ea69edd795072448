"""Find out what a caller is about to do with the value that a function returns."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

from zeroengine.errors import ZeroEngineError

P = ParamSpec("P")
R = TypeVar("R")


def returns_one_value(message: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that returns one value where another library's of its name returns several.

    A dict would be unpacked into its keys, without a word where there are as many. A tuple may be unpacked.

    Args:
        message: The text of the ZeroEngineError that is raised, after the call, where a dict or None is unpacked.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            result = function(*args, **kwargs)
            # Only a dict or None can be a mistake. The frame is inspected only then, because disassembling it takes
            # time.
            if (result is None or isinstance(result, dict)) and unpacks_result(sys._getframe(1)):
                raise ZeroEngineError(message)
            return result

        return checked

    return decorate


def unpacks_result(frame: FrameType) -> bool:
    """Return whether ``frame``, which waits for a call to return, unpacks the result into several names.

    The statement ``first, second = function()`` does so. CPython compiles it to an UNPACK instruction directly after
    that of the call. ``f_lasti`` is the instruction of the call or one of its inline cache entries, which ``dis``
    leaves out (CPython 3.10 to 3.14).

    Args:
        frame: The frame of the caller, such as ``sys._getframe(1)``.
    """
    # The first instruction after the call decides: Python unpacks directly after the call or not at all.
    following = (i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti)
    return next((i.opname.startswith("UNPACK_") for i in following), False)
