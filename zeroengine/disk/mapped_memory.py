"""Tensors that are part of a mapped file: populated before they are used, evicted afterwards.

Guarantee: a failing or full disk raises an error in ``populate``, and does not end the process by SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable

from torch import Tensor

from zeroengine.errors import OffloadError
from zeroengine.utils.host_memory import address_of

# [Note: SIGBUS]
# The first access to a page of a mapped file reads it. If the disk fails, the kernel cannot return an error from a load
# or a store; it ends the process by SIGBUS. ``populate`` requests the pages by ``madvise`` (MADV_POPULATE_READ and
# MADV_POPULATE_WRITE, Linux 5.14), which does return an error. So populate a mapped tensor before using it. On an older
# kernel ``madvise`` returns EINVAL, nothing is populated, and SIGBUS remains possible.
#
# Python's mmap has no names for these values.
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
_libc = ctypes.CDLL(None, use_errno=True)

# The mapping behind each registered tensor, by the address of the tensor's storage.
_mapping_by_address: weakref.WeakValueDictionary[int, MappedFile] = weakref.WeakValueDictionary()


class MappedFile(mmap.mmap):
    """A mapped part of a file.

    Attributes:
        before_use: Called by ``populate`` with the tensor, and whether it is going to be written. It may raise.
    """

    before_use: Callable[[Tensor, bool], None] | None = None


def register(tensor: Tensor, mapping: MappedFile) -> None:
    """Register ``tensor``, a view of ``mapping``, for ``populate`` and ``release_mapped``. They also take its views."""
    _mapping_by_address[tensor.untyped_storage().data_ptr()] = mapping


def call_before_use(tensor: Tensor, call: Callable[[Tensor, bool], None]) -> None:
    """Let ``populate`` of a registered tensor, or of a view of it, first call ``call``. See ``MappedFile``."""
    _mapping_by_address[tensor.untyped_storage().data_ptr()].before_use = call


def populate(tensor: Tensor, *, write: bool = False) -> None:
    """Bring a mapped tensor, or a view of one, into memory before its values are used in place.

    Tensors that are not registered are left alone.

    Args:
        write: Whether the values are going to be written.

    Raises:
        OffloadError: The disk cannot be read.
    """
    mapping = _mapping_by_address.get(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else None
    if mapping is None:
        return
    if mapping.before_use is not None:
        mapping.before_use(tensor, write)
    try:
        populate_pages(tensor, write=write)
    except OSError:
        raise OffloadError(
            "states on NVMe cannot be read: the disk fails, or the file has lost its space (see dmesg). Replace the "
            "disk, write another nvme_path, and load the last checkpoint"
        ) from None


def populate_pages(tensor: Tensor, *, write: bool = False) -> None:
    """Bring the pages of any CPU tensor into memory. Pages of a mapped file are read now.

    Args:
        write: Whether the values are going to be written.

    Raises:
        OSError: They cannot be read. Old kernels do not report this: see the note above.
    """
    if not tensor.numel():
        return
    # ``madvise`` needs the address of a page. It rounds the length up itself.
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    stop = tensor.data_ptr() + _extent_bytes(tensor)
    advice = MADV_POPULATE_WRITE if write else MADV_POPULATE_READ
    # ctypes releases the interpreter's lock, so other threads run while the disk reads.
    failed = _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)
    if failed and ctypes.get_errno() != errno.EINVAL:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def release_mapped(tensor: Tensor) -> None:
    """Evict the pages of a registered tensor, or of a view of one, from this process. The data stays in the file."""
    mapping = _mapping_by_address[tensor.untyped_storage().data_ptr()]
    # Python's ``madvise`` takes offsets within the mapping.
    offset = tensor.data_ptr() - address_of(mapping)
    start, stop = offset // mmap.PAGESIZE * mmap.PAGESIZE, offset + _extent_bytes(tensor)
    if stop > start:
        # The file is mapped shared, so what was written stays in the page cache and goes to the disk from there.
        mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _extent_bytes(tensor: Tensor) -> int:
    """Return the bytes from the first element of a strided tensor to the end of its last one."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size()
