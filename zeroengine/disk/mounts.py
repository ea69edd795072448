"""The file system that a path lies on, as the kernel lists it in ``/proc/self/mountinfo``."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


@dataclass(frozen=True)
class Mount:
    """A mounted file system.

    Attributes:
        path: The folder that it is mounted on.
        filesystem: Its type, such as ext4, xfs, nfs4 or tmpfs.
        device: The source that it is mounted from, such as /dev/nvme0n1p1 or server:/export.
    """

    path: str
    filesystem: str
    device: str

    @property
    def in_memory(self) -> bool:
        """Whether files on it take memory and not a disk."""
        return self.filesystem in MEMORY_FILESYSTEMS


def mount_of(path: str | os.PathLike[str]) -> Mount:
    """Return the file system of a path that exists.

    Type and device are "unknown" if the kernel does not list it.
    """
    real_path = os.path.realpath(path)
    mount = Mount("/", "unknown", "unknown")
    # Without /proc the file system is unknown, and the caller treats it as any other.
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as lines:
        for line in lines:
            # The number of fields before the hyphen varies. After it come the type and the device.
            before, _, after = line.partition(" - ")
            mount_point, (filesystem, device) = _unescape(before.split()[4]), after.split()[:2]
            is_above = os.path.commonpath((real_path, mount_point)) == mount_point
            # Of two mounts on one folder the later hides the earlier, so `>=` lets it replace the earlier.
            if is_above and len(mount_point) >= len(mount.path):
                mount = Mount(mount_point, filesystem, _unescape(device))
    return mount


def _unescape(text: str) -> str:
    """Return a field of mountinfo as plain text. mountinfo writes special characters as octal numbers."""
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape") if "\\" in text else text
