"""CPU memory that direct I/O reads into and writes from without a copy.

Guarantees of ``aligned_zeros``: The address is a multiple of ``ALIGNMENT`` bytes. The memory belongs to the tensor up
to the end of its last page. It is zero at first, and unmapped when the last view of the tensor is gone.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from zeroengine.ops._aio_library import ALIGNMENT as ALIGNMENT
from zeroengine.utils.formats import round_up
from zeroengine.utils.host_memory import map_in_huge_pages


# [Note: Memory and forked children]
# A fork would copy all page-locked memory at once. It is therefore marked MADV_DONTFORK, and the child has nothing at
# its address, or a mapping of its own. Python's object for the memory still exists in the child, and its destructor
# would unmap the child's own mapping. ``Pages.owner`` tells the child never to destroy the object.
class Pages(mmap.mmap):
    """Anonymous memory of this process alone. See the note on forked children above.

    Attributes:
        before_unmap: Called before the memory is unmapped, to unlock it.
        owner: The process that has the memory, if its forked children do not; else None.
    """

    before_unmap: Callable[[], None] | None = None
    owner: int | None = None

    def __new__(cls, nbytes: int) -> Pages:
        """Map ``nbytes`` bytes of zeros. mmap's default, a shared mapping, would be shared with forked children."""
        return super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __del__(self) -> None:
        """Unlock the memory before it is unmapped, or keep the object if the memory belongs to another process."""
        if self.owner not in (None, os.getpid()):
            _pages_of_parent.append(self)
        elif self.before_unmap is not None:
            self.before_unmap()


# Objects that a forked child must never destroy: see the note above.
_pages_of_parent: list[Pages] = []

# The pages behind each ``aligned_zeros``, by the address of its storage. The tensor keeps them alive. An entry vanishes
# with its pages, so a reused address never finds stale ones.
_pages_by_address: weakref.WeakValueDictionary[int, Pages] = weakref.WeakValueDictionary()


def round_up_to_block(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``ALIGNMENT``."""
    return round_up(nbytes, ALIGNMENT)


def aligned_zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a new 1-D CPU tensor of zeros that direct I/O can use without a copy.

    Large tensors begin at a huge page and lie in huge pages where the system has them.
    """
    nbytes = numel * dtype.itemsize
    if nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    padded = round_up_to_block(nbytes)
    pages, offset = map_in_huge_pages(padded, Pages)
    tensor = torch.frombuffer(pages, dtype=dtype, count=numel, offset=offset)
    # The tensor begins at its storage's address, by which views find the pages.
    _pages_by_address[tensor.data_ptr()] = pages
    return tensor


def pages_of(tensor: Tensor) -> Pages:
    """Return the pages of an ``aligned_zeros`` or of a view of one."""
    return _pages_by_address[tensor.untyped_storage().data_ptr()]


def owns_last_page(tensor: Tensor) -> bool:
    """Return whether the rest of the tensor's last page belongs to it, so that direct I/O may move the whole page.

    This is true for an ``aligned_zeros`` and for a view of its end.
    """
    storage = tensor.untyped_storage()
    end = tensor.data_ptr() + tensor.nbytes
    # If a view ends before its storage does, a read of the whole page would overwrite other elements.
    return storage.data_ptr() in _pages_by_address and end == storage.data_ptr() + storage.nbytes()
