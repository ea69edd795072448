"""Files on a disk for states that do not fit in memory. They have no names: what dies with the process leaves nothing.

A file is unlinked as soon as it is open, so its space belongs to the open descriptors alone. However the process ends,
the kernel takes the space back; there is nothing to clean up and nothing that another run could mistake for its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import secrets
import weakref

import torch
from torch import Tensor

from zeroengine.disk.mounts import mount_of
from zeroengine.disk.queue import ALIGNMENT, Descriptors, address_of, round_up
from zeroengine.errors import OffloadError
from zeroengine.utils.paths import checked_path

log = logging.getLogger("zeroengine")

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # of Linux 5.14; Python's mmap has no names for them
DISK_ERRORS = (errno.EFAULT, errno.EIO, 133)  # 133: EHWPOISON, that the memory fails; others are no reason to stop
_libc = ctypes.CDLL(None, use_errno=True)

_mapped: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""The mapping behind each tensor of `SwapFile.mapped`, by the address of the tensor's storage."""


class SwapFolder:
    """A folder of a disk that this rank keeps states in. Runs and ranks may share it: their files have no names.

    Attributes:
        path: the folder.
        direct: whether its files are read and written past the page cache.
    """

    def __init__(
        self, nvme_path: str | os.PathLike[str], *, rank: int, min_free_bytes: int = 0, direct: bool = True
    ) -> None:
        """
        Args:
            nvme_path: a folder on a local disk.
            rank: names this rank's files in messages.
            min_free_bytes: what will be needed here.
            direct: False to go through the page cache, even where direct I/O works.

        Raises:
            OffloadError: there is no such folder, it cannot be written, lies in memory, or has not as much room.
        """
        self.path, self.rank = os.path.realpath(checked_path(nvme_path, "nvme_path", OffloadError)), rank
        self._files: weakref.WeakSet[SwapFile] = weakref.WeakSet()
        if not os.path.isdir(self.path):
            found = "is a file" if os.path.exists(self.path) else "does not exist"
            raise OffloadError(f"nvme_path {nvme_path} {found}: write a folder on a local disk, or make it: mkdir -p")
        mount = mount_of(self.path)
        if mount.in_memory:
            raise OffloadError(
                f"nvme_path {nvme_path} is on {mount.filesystem}, which is memory: write a folder on a disk, or "
                'offload to memory with "device": "cpu"'
            )
        self.direct = self._try(direct)
        if direct and not self.direct:
            log.warning(
                "nvme_path %s: its file system (%s) has no direct I/O; transfers go through the page cache, which "
                "costs memory and time",
                nvme_path,
                mount.filesystem,
            )
        if (free := self.free_bytes()) < min_free_bytes:
            raise OffloadError(
                f"nvme_path {nvme_path} has {_size(free)} free, but {_size(min_free_bytes)} are needed: make room, or "
                "write a folder on a larger disk"
            )

    def file(self, name: str, nbytes: int) -> SwapFile:
        """A new file of this process's own, whose space is taken at once.

        Args:
            name: for messages.
            nbytes: its size, rounded up to a multiple of 4096.

        Raises:
            OffloadError: there is no room for it.
        """
        nbytes = round_up(nbytes)
        path = os.path.join(self.path, f"zeroengine-{os.getpid()}-rank{self.rank}-{name}")
        descriptors = self._open(path, self.direct)
        free = self.free_bytes()
        try:
            if nbytes > free:  # so that trying does not fill the disk for others
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if nbytes:
                os.posix_fallocate(descriptors.buffered, 0, nbytes)
        except OSError as error:
            raise OffloadError(
                f"{path} needs {_size(nbytes)}, but cannot have them ({error.strerror}; its disk has {_size(free)} "
                "free): make room, or write an nvme_path on a larger disk"
            ) from None
        out = SwapFile(path, nbytes, descriptors)
        self._files.add(out)
        return out

    def free_bytes(self) -> int:
        """What this process may still write to the folder's disk."""
        stats = os.statvfs(self.path)
        return stats.f_bavail * stats.f_frsize

    def close(self) -> None:
        """Closes every file. The space comes back once no transfer and no mapped tensor uses it."""
        for file in list(self._files):
            file.close()

    def _open(self, path: str, direct: bool) -> Descriptors:
        """A new file without a name. `direct` asks for O_DIRECT, if the file system lets it be opened so."""
        name = f"{path}-{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            out = Descriptors(os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600))
            try:
                if direct and hasattr(os, "O_DIRECT"):
                    with contextlib.suppress(OSError):
                        out.direct = os.open(name, flags | os.O_DIRECT)
            finally:
                os.unlink(name)
        except OSError as error:
            what = {
                errno.EROFS: "is on a read-only file system",
                errno.EACCES: "cannot be written by this user",
                errno.EPERM: "cannot be written by this user",
                errno.ENOSPC: "is on a full disk",
            }.get(error.errno or 0, f"cannot hold files ({error.strerror})")
            raise OffloadError(f"nvme_path {self.path} {what}: write a folder on a disk that can be written") from None
        return out

    def _try(self, direct: bool) -> bool:
        """Whether direct I/O works: some file systems let files be opened for it and refuse it then.

        Raises:
            OffloadError: files cannot be made here at all.
        """
        descriptors = self._open(os.path.join(self.path, f"zeroengine-{os.getpid()}-rank{self.rank}-try"), direct)
        if descriptors.direct < 0:
            return False
        with mmap.mmap(-1, ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
            try:
                written, read = (move(descriptors.direct, [page], 0) for move in (os.pwritev, os.preadv))
                return written == read == ALIGNMENT
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return False
                raise OffloadError(f"nvme_path {self.path} cannot be written: {error.strerror}") from None


class SwapFile:
    """A file of a `SwapFolder`, gone with its last use.

    Attributes:
        path: for messages; `ls` does not show it.
        nbytes: its size, a multiple of 4096.
        direct: whether it is read and written past the page cache.
    """

    def __init__(self, path: str, nbytes: int, descriptors: Descriptors) -> None:
        self.path, self.nbytes, self.direct = path, nbytes, descriptors.direct >= 0
        self._descriptors: Descriptors | None = descriptors

    @property
    def descriptors(self) -> Descriptors:
        if self._descriptors is None:
            raise OffloadError(f"{self.path} is closed")
        return self._descriptors

    def mapped(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor that is this part of the file: reads come from the disk, writes go there.

        It sees what transfers wrote, and they see what was written to it, as long as the two do not overlap in time.
        Pages that it touched count as this process's memory until `release_mapped`.

        Raises:
            OffloadError: the file is closed or too short, or `offset_bytes` is no multiple of the dtype's size.
        """
        nbytes = numel * dtype.itemsize
        if offset_bytes < 0 or offset_bytes % dtype.itemsize:
            raise OffloadError(f"offset {offset_bytes} in {self.path}: {dtype} needs a multiple of {dtype.itemsize}")
        if offset_bytes + nbytes > self.nbytes:
            raise OffloadError(f"{nbytes:,} bytes at offset {offset_bytes:,} of {self.path}, which has {self.nbytes:,}")
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        skip = offset_bytes % mmap.ALLOCATIONGRANULARITY
        try:
            mapping = mmap.mmap(self.descriptors.buffered, skip + nbytes, offset=offset_bytes - skip)
        except OSError as error:
            raise OffloadError(f"{self.path} cannot be mapped: {error.strerror}") from None
        out = torch.frombuffer(mapping, dtype=dtype, count=numel, offset=skip)
        _mapped[out.data_ptr()] = mapping
        return out

    def close(self) -> None:
        """Lets go of the file. Transfers under way and mapped tensors stay good, and keep its space until they end."""
        self._descriptors = None


def populate(tensor: Tensor, *, write: bool = False) -> None:
    """Bring a tensor of `SwapFile.mapped`, or a view of one, into memory before its values are used in place.

    Using it would do the same, but where the disk fails that ends the process by SIGBUS. Other tensors are left alone.

    Args:
        write: whether the values are going to be written.

    Raises:
        OffloadError: the disk cannot be read.
    """
    if tensor.device.type != "cpu" or tensor.untyped_storage().data_ptr() not in _mapped:
        return
    try:
        populate_pages(tensor, write=write)
    except OSError:
        raise OffloadError(
            "states on NVMe cannot be read: the disk fails, or the file has lost its space (see dmesg). Replace the "
            "disk, write another nvme_path, and load the last checkpoint"
        ) from None


def populate_pages(tensor: Tensor, *, write: bool = False) -> None:
    """Bring the pages that a tensor lies in into memory: those of a mapped file are read now, or it is said why not.

    Raises:
        OSError: they cannot be. Linux before 5.14 cannot say so.
    """
    if not tensor.numel():
        return
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    stop = tensor.data_ptr() + (1 + _last_element(tensor)) * tensor.element_size()
    advice = MADV_POPULATE_WRITE if write else MADV_POPULATE_READ
    if (
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)
        and ctypes.get_errno() != errno.EINVAL
    ):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def release_mapped(tensor: Tensor) -> None:
    """Gives back the memory of a tensor of `SwapFile.mapped`, or of a view of one. The data stays; the next use reads
    it again.

    Raises:
        OffloadError: it is another tensor.
    """
    base = tensor.untyped_storage().data_ptr()
    mapping = _mapped.get(base)
    if mapping is None:
        raise OffloadError("release_mapped: this tensor is not one of SwapFile.mapped; pass what that returned")
    start = address_of(mapping)
    first = (tensor.data_ptr() - start) // mmap.PAGESIZE * mmap.PAGESIZE
    last = tensor.data_ptr() - start + (tensor.numel() and 1 + _last_element(tensor)) * tensor.element_size()
    if last > first:
        mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


def _last_element(tensor: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.1f} MiB"
