"""Places in a mapping that huge pages can lie at: at a multiple of their size, in memory and in a file alike."""

from __future__ import annotations

import contextlib
import mmap

import torch

HUGE_PAGE_BYTES = 2 << 20


def address_of(mapping: mmap.mmap) -> int:
    """Return the address that a mapping begins at."""
    return torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()


def huge_page_offset(mapping: mmap.mmap, phase: int = 0) -> int:
    """Return the smallest offset in a mapping whose address is ``phase`` bytes after a multiple of a huge page's size.

    Args:
        mapping: A mapping that is longer by a huge page than what is to lie in it.
        phase: Taken modulo ``HUGE_PAGE_BYTES``.
    """
    return (phase - address_of(mapping)) % HUGE_PAGE_BYTES


def start_of_huge_pages(mapping: mmap.mmap, nbytes: int) -> int:
    """Ask for huge pages in a mapping that is new, and return the offset at which the first of them can lie.

    Args:
        mapping: A mapping that is longer by a huge page than what is to lie in it.
        nbytes: The bytes that lie in it from this offset on, in whole pages.
    """
    start = huge_page_offset(mapping)
    # A huge page at the end would also back addresses that are only reserved, which nobody counts as memory.
    whole = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    # Not every system has them.
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_NOHUGEPAGE, start + whole)
        mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return start
