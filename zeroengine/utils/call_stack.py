"""Find calls among the calls in progress of this thread."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, TypeVar

R = TypeVar("R")

# Functions of these packages may call zeroengine's on behalf of zeroengine.
TRANSPARENT_PACKAGES = ("zeroengine", "contextlib", "torch")


def calls_in_progress(code: CodeType) -> Iterator[FrameType]:
    """Yield the frames of this thread that run ``code``, the innermost first."""
    return (frame for frame, _ in walk_stack(sys._getframe(1)) if frame.f_code is code)


def run_as_own_call(function: Callable[..., R], *args: Any) -> R:
    """Run a function to which ranks come from different calls: ``public_call`` returns it in place of these."""
    return function(*args)


def public_call() -> str:
    """Return the function of zeroengine that the user's code has called, such as ``save_checkpoint()``."""
    name = ""
    for frame, _ in walk_stack(sys._getframe(1)):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in TRANSPARENT_PACKAGES or frame.f_code is run_as_own_call.__code__:
            break
        # Functions within functions are wrappers, such as those of decorators.
        if package == "zeroengine" and not frame.f_code.co_flags & inspect.CO_NESTED:
            name = frame.f_code.co_name
    return f"{name}()"
