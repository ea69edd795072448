"""Memory of the host: in huge pages, locked for copies to a GPU, and given back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from typing import Any, TypeVar

import torch

# -- huge pages --------------------------------------------------------------------------------------


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


# -- page-locked memory ------------------------------------------------------------------------------


def page_lock(memory: torch.Tensor) -> tuple[int, Callable[[], None]]:
    """Page-lock memory of the CPU.

    Returns:
        CUDA's error, which is 0 where the memory is locked, and a function that unlocks it. Call it before the memory
        is unmapped.
    """
    cudart: Any = torch.cuda.cudart()
    address = memory.untyped_storage().data_ptr()

    def unlock() -> None:
        # The CUDA runtime may be gone when the interpreter exits.
        with contextlib.suppress(Exception):
            cudart.cudaHostUnregister(address)

    error = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
    if error:
        # The runtime keeps the error, and torch would raise it at the next launch of a kernel, which is this one.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return error, unlock


# -- freed memory ------------------------------------------------------------------------------------


def trim_heap() -> None:
    """Call glibc's ``malloc_trim``, which walks the whole heap in some milliseconds.

    Do nothing where the C library has none.
    """
    # Only glibc has this function.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
