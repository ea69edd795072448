"""Check the paths that users pass: a wrong one is an error, never another folder. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from zeroengine.errors import ZeroEngineError


def in_home(path: str) -> str:
    """Return `path` with a leading `~` replaced by the home folder, as a shell does, which no system call does.

    Raises:
        ValueError: There is no such user. A folder whose name begins so is written `./~name`.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"{path} begins with ~, and there is no such user: for a folder of that name write ./{path}")
    return expanded


def path_argument(text: str) -> Path:
    """Return an argument of a command line as a path, which a shell may not have expanded, as in `--dir=~/runs`."""
    return Path(in_home(text))


def checked_path(path: object, argument: str, error: type[ZeroEngineError] = ZeroEngineError) -> str:
    """Return `path` as a string, with a leading `~` replaced by the home folder.

    Args:
        path: What the user passed.
        argument: What the user calls it, for the message.
        error: The class of the error.

    Raises:
        ZeroEngineError: It is no path, or it is empty, which the system would take for the working folder, or no
            system can have it.
    """
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(name, str):
        raise error(f"{argument} is a path, such as 'runs/a'; found {path!r}")
    if not name.strip():
        raise error(f"{argument} is a path, such as 'runs/a', and is empty here. For the working folder write '.'")
    if "\0" in name:
        raise error(f"{argument} is a path, and {name!r} holds a NUL character, which no path may hold")
    try:
        return in_home(name)
    except ValueError as problem:
        raise error(f"{argument}: {problem}") from None


def is_file_name(name: object) -> bool:
    """Return whether `name` stays within the folder that it is joined to."""
    return isinstance(name, str) and os.path.basename(name) == name and name not in ("", ".", "..")
