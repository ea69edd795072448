"""Prepares the process that forks ranks, when it is imported after all other modules, so that a fork costs less.

All that was imported so far leaves the garbage collector's sight: a process that is forked later would else write to,
and so copy, every page of these modules at its first collection. And memory moves into huge pages where the kernel has
them: a fork copies an entry of the page table for each page, which takes 25 ms for 300 MiB in pages of 4 KiB, and 7 ms
in huge ones.
"""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

HUGE_PAGE = 2 << 20  # bytes
MADV_COLLAPSE = 25  # of Linux 6.1; older kernels refuse it, which changes nothing


def move_into_huge_pages() -> None:
    """Ask the kernel for huge pages under the heap and other anonymous memory of this process."""
    try:
        mappings = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    libc = ctypes.CDLL(None)
    for mapping in mappings:
        match = re.fullmatch(r"(\w+)-(\w+) rw-p 0+ 00:00 0 *(\[heap\])?", mapping)
        if match is None:
            continue
        first, last = int(match[1], 16), int(match[2], 16)
        for address in range(-(-first // HUGE_PAGE) * HUGE_PAGE, last - HUGE_PAGE + 1, HUGE_PAGE):
            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


gc.collect()
gc.freeze()
move_into_huge_pages()
