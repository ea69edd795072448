"""What a path lies on: its file system, as the kernel lists it."""

from __future__ import annotations

import os
from dataclasses import dataclass

MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


@dataclass(frozen=True)
class Mount:
    """A mounted file system."""

    path: str
    filesystem: str  # ext4, xfs, nfs4, tmpfs, ...
    device: str  # /dev/nvme0n1p1, server:/export, ...

    @property
    def in_memory(self) -> bool:
        return self.filesystem in MEMORY


def mount_of(path: str | os.PathLike[str]) -> Mount:
    """The file system of a path that exists. Where the kernel does not tell, its type and device are "unknown"."""
    real = os.path.realpath(path)
    best = Mount("/", "unknown", "unknown")
    try:
        with open("/proc/self/mountinfo") as lines:
            for line in lines:
                before, _, after = line.partition(" - ")
                point, (kind, device) = unescape(before.split()[4]), after.split()[:2]
                # Of two mounts on one point the later hides the earlier.
                if is_within(real, point) and len(point) >= len(best.path):
                    best = Mount(point, kind, unescape(device))
    except OSError:
        pass
    return best


def is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def unescape(text: str) -> str:
    """mountinfo writes spaces and the like as octal numbers."""
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape") if "\\" in text else text
