"""Finalizers that belong to one process.

[Note: Forked children]
A fork copies objects and none of the threads, so a child that ended what it inherited would wait for threads that it
does not have, with locks that nobody gives back, or would end what its parent still uses. Children are many: workers of
a DataLoader, which collect the parent's garbage, and those of ``multiprocessing`` and ``os.fork``. So a child owns
nothing of what it inherits: finalizers do nothing there.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any


def finalize(owner: object, function: Callable[..., Any], *arguments: Any) -> weakref.finalize[..., Any]:
    """Call ``function`` once: by the result, with the last reference to ``owner``, or when the interpreter exits.

    At the exit the last one that was made runs first. Then all threads still run that are no daemons' of Python.
    It is never called in a forked child.

    Args:
        owner: The object that holds what is freed. Neither ``function`` nor ``arguments`` may refer to it.
        function: Frees it.
        arguments: Passed to ``function``.
    """
    return weakref.finalize(owner, _call_in_process, os.getpid(), function, arguments)


def keep_until_process_ends(value: object) -> None:
    """Let nothing ever free ``value``, not even the interpreter when it shuts down."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def exits_with_error() -> bool:
    """Return whether the interpreter exits because of an error, so that other ranks may never answer again."""
    # Python sets this before it exits with an error that nothing has handled.
    return getattr(sys, "last_value", None) is not None


def _call_in_process(process: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments) if process == os.getpid() else None
