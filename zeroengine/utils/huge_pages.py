"""Places in a mapping that huge pages can lie at: at a multiple of their size, in memory and in a file alike."""

from __future__ import annotations

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
