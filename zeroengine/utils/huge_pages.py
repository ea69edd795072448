"""Places in a mapping that huge pages can lie at: at a multiple of their size, in memory and in a file alike."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from typing import TypeVar

import torch

HUGE_PAGE_BYTES = 2 << 20
M = TypeVar("M", bound=mmap.mmap)


def address_of(mapping: mmap.mmap) -> int:
    """Return the address that a mapping begins at."""
    return torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()


def private_mapping(nbytes: int) -> mmap.mmap:
    """Map memory of this process alone."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def huge_page_offset(mapping: mmap.mmap, phase: int = 0) -> int:
    """Return the smallest offset in a mapping whose address is ``phase`` bytes after a multiple of a huge page's size.

    Args:
        mapping: A mapping that is longer by a huge page than what is to lie in it.
        phase: Taken modulo ``HUGE_PAGE_BYTES``.
    """
    return (phase - address_of(mapping)) % HUGE_PAGE_BYTES


def map_in_huge_pages(nbytes: int, map_memory: Callable[[int], M], phase: int = 0) -> tuple[M, int]:
    """Map private memory, in huge pages where it is large enough and the system has them.

    Args:
        nbytes: The bytes of the memory.
        map_memory: Maps so many bytes, such as ``private_mapping``.
        phase: Large memory begins so many bytes after a multiple of a huge page's size, in whole pages.

    Returns:
        The mapping, and the offset at which the memory begins in it.
    """
    if nbytes < HUGE_PAGE_BYTES:
        return map_memory(nbytes), 0
    # mmap aligns only to small pages. The addresses before and after the memory are reserved, and hold nothing.
    mapping = map_memory(nbytes + HUGE_PAGE_BYTES)
    start = huge_page_offset(mapping, phase)
    # A huge page at the end would also back addresses that are only reserved, which nobody counts as memory.
    end = start + nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    # Not every system has them.
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_NOHUGEPAGE, end)
        mapping.madvise(mmap.MADV_HUGEPAGE, start, end - start)
    return mapping, start
