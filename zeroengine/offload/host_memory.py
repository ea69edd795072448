"""Find the CPU memory that is available to this process, and check that offload fits into it."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from zeroengine.errors import OffloadError
from zeroengine.utils.formats import parse_byte_size

# Bytes of a machine's CPU memory that count as free at most, such as "100GiB", where something else takes the rest.
HOST_LIMIT_VARIABLE = "ZEROENGINE_FREE_HOST_MEMORY"


def available_memory() -> float:
    """Return the bytes of CPU memory available on this machine, by Linux, by the limits of cgroups, and by the user.

    Raises:
        OffloadError: The environment variable is no size.
    """
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _read_text("/proc/meminfo"), re.MULTILINE)
    nbytes = int(available[1]) << 10 if available is not None else math.inf
    for cgroup in _cgroups():
        limit, usage = _read_text(cgroup / "memory.max").strip(), _read_text(cgroup / "memory.current").strip()
        if limit.isdigit() and usage.isdigit():
            # The usage includes the page cache of files, which the kernel drops when memory is short.
            inactive = re.search(r"^inactive_file (\d+)$", _read_text(cgroup / "memory.stat"), re.MULTILINE)
            nbytes = min(nbytes, int(limit) - int(usage) + (int(inactive[1]) if inactive is not None else 0))
    user_limit = os.environ.get(HOST_LIMIT_VARIABLE)
    return nbytes if user_limit is None else min(nbytes, parse_byte_size(user_limit, HOST_LIMIT_VARIABLE, OffloadError))


def _cgroups() -> list[Path]:
    """Return the folders of this process's cgroup and of those that contain it, any of which may limit its memory."""
    root = Path("/sys/fs/cgroup")
    # In a container the path may name the host's folders, which do not exist there, and the root is the container's.
    own = re.search(r"^0::/(.*)$", _read_text("/proc/self/cgroup"), re.MULTILINE)
    path = root / own[1] if own is not None else root
    return [path, *(parent for parent in path.parents if parent.is_relative_to(root))]


def check_host_memory(nbytes: int, *, on_disk: bool) -> None:
    """Check that offload fits into CPU memory.

    Args:
        nbytes: The bytes that each rank will take.
        on_disk: Whether the states themselves are on a disk, so that only buffers take memory.

    Raises:
        OffloadError: There is less CPU memory left than all ranks of this machine will take.
    """
    # Every rank of the machine runs this at about the same time, before any of them has allocated.
    ranks, available = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), available_memory()
    if nbytes * ranks > available:
        alternative = "" if on_disk else ', or write "device": "nvme"'
        raise OffloadError(
            f"offloading takes {nbytes * ranks / 2**30:,.1f} GiB of CPU memory on this machine ({ranks} "
            f"{'ranks' if ranks > 1 else 'rank'}), and {available / 2**30:,.1f} GiB are left: offload less with "
            f'"ratio", with smaller units, or with a smaller "buffer_size" or "buffer_count", use more '
            f"machines{alternative}"
        )


def _read_text(path: str | Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
