"""Write a file as a whole, so that a reader, and a crash, leave the old content or the new one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

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
