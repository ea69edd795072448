"""Check the paths that users pass: a wrong one is an error, never another folder. Needs no torch."""

from __future__ import annotations

import os

from zeroengine.errors import ZeroEngineError


def checked_path(path: object, argument: str, error: type[ZeroEngineError] = ZeroEngineError) -> str:
    """Return `path` as a string.

    Args:
        path: What the user passed.
        argument: What the user calls it, for the message.
        error: The class of the error.

    Raises:
        ZeroEngineError: It is no path, or it is empty, which the system would take for the working folder.
    """
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(name, str):
        raise error(f"{argument} is a path, such as 'runs/a'; found {path!r}")
    if not name.strip():
        raise error(f"{argument} is a path, such as 'runs/a', and is empty here. For the working folder write '.'")
    return name


def is_file_name(name: object) -> bool:
    """Return whether `name` stays within the folder that it is joined to."""
    return isinstance(name, str) and os.path.basename(name) == name and name not in ("", ".", "..")
