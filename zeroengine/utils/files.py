"""Files of users and of runs: paths that are checked, files that are replaced as a whole, names in a run folder.

This file needs no torch.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from zeroengine.errors import ZeroEngineError

# -- paths -------------------------------------------------------------------------------------------


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


# -- replaced files ----------------------------------------------------------------------------------


# The permissions of a new file before the process's mask takes some away.
NEW_FILE_MODE = 0o666


def replace_file(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` in UTF-8 to ``path``, whose content is replaced by a rename.

    An old file keeps its permissions. A link is followed. What is no file, such as ``/dev/stdout``, is written to.

    Raises:
        OSError: It cannot be written; the old content is still there.
    """
    # The file behind a link is replaced, and not the link.
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    # A temporary file is readable by its owner alone.
    mode = target.stat().st_mode & 0o7777 if target.exists() else NEW_FILE_MODE & ~_mask()
    with tempfile.NamedTemporaryFile(
        "w", dir=target.parent, prefix=f".{target.name}.", delete=False, encoding="utf-8"
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.chmod(file.name, mode)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def _mask() -> int:
    # The mask can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# -- the run folder ----------------------------------------------------------------------------------


RUN, STEPS, EVENTS, DIGESTS = "run.json", "steps.jsonl", "events.jsonl", "digests.jsonl"
# The number of the format of `digests.jsonl`, and of digests themselves. Others do not compare.
DIGEST_FORMAT = 1
# What each rank was given in a step, by the names of its digests beside those of states, in words.
GIVEN = {"inputs": "inputs of the model", "generators": "states of torch's random generators"}
