"""Find the CPU memory that is available to this process, and check that offload fits into it."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from zeroengine.errors import OffloadError


def available_memory() -> float:
    """Return the bytes of CPU memory available to this process, by Linux and by the container's limit."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _read_text("/proc/meminfo"), re.MULTILINE)
    nbytes = int(available[1]) << 10 if available is not None else math.inf
    # A container may limit this process to less than the machine's free memory.
    cgroup = Path("/sys/fs/cgroup")
    limit, usage = _read_text(cgroup / "memory.max").strip(), _read_text(cgroup / "memory.current").strip()
    if limit.isdigit() and usage.isdigit():
        # The usage includes the page cache of files, which the kernel drops when memory is short.
        inactive = re.search(r"^inactive_file (\d+)$", _read_text(cgroup / "memory.stat"), re.MULTILINE)
        nbytes = min(nbytes, int(limit) - int(usage) + (int(inactive[1]) if inactive is not None else 0))
    return nbytes


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
