"""Files of others that a ``DiskQueue`` reads."""

from __future__ import annotations

import contextlib
import os

from zeroengine.disk.queue import Descriptors
from zeroengine.errors import OffloadError


class ReadOnlyFile:
    """A file that somebody else has written, and that stays as it is. Another file may take its name.

    Args:
        path: The file.

    Attributes:
        path: Its path.
        nbytes: Its size in bytes.
        disk: The number of the disk that it is on.
        descriptors: They stay open as long as this object.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        flags = os.O_RDONLY | os.O_CLOEXEC
        self.descriptors = Descriptors(os.open(self.path, flags))
        # Some file systems have no direct I/O.
        with contextlib.suppress(OSError, AttributeError):
            self.descriptors.direct = os.open(f"/proc/self/fd/{self.descriptors.buffered}", flags | os.O_DIRECT)
        status = os.fstat(self.descriptors.buffered)
        self.nbytes, self.disk, self._changed = status.st_size, status.st_dev, status.st_mtime_ns

    def check_unchanged(self) -> None:
        """Check that nobody has written to the file since it was opened.

        Raises:
            OffloadError: Somebody has.
        """
        status = os.fstat(self.descriptors.buffered)
        if (status.st_size, status.st_mtime_ns) != (self.nbytes, self._changed):
            raise OffloadError(
                f"{self.path} was changed after weights were loaded from it, and they are still read there: start "
                "again with weights in a file that stays as it is, or on another disk than nvme_path, from which they "
                "are copied"
            )
