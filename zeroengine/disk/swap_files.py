"""Files on a disk for states that do not fit in memory.

Guarantees:

- *A file has no name.* It is unlinked as soon as it is open, so only the open descriptors hold its space. However
  the process ends, the kernel takes the space back. Nothing remains to clean up or to confuse another run.
- *A file's space is allocated when it is made*, by ``posix_fallocate``. A full disk is an error at the start, not a
  SIGBUS or a failed write in the middle of a step. Only frozen parameters without values get it with their values.
- *Direct I/O* if the file system supports it, which a trial at the start shows. See ``queue`` for the alignment.
- *No file is ever synced*, because nothing reads it after the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
import weakref

import torch
from torch import Tensor

from zeroengine.disk import mapped_memory
from zeroengine.disk.aligned_memory import ALIGNMENT, round_up_to_block
from zeroengine.disk.mounts import mount_of
from zeroengine.disk.queue import Descriptors
from zeroengine.errors import OffloadError
from zeroengine.utils.files import checked_path
from zeroengine.utils.formats import format_byte_size

log = logging.getLogger("zeroengine")


class SwapFolder:
    """A folder on a disk in which this process keeps states. Runs and ranks may share it: their files have no names.

    Args:
        nvme_path: A folder on a local disk.
        label: The name of this process's files in messages, such as "rank0".
        min_free_bytes: The bytes that will be needed here.

    Attributes:
        path: The folder.
        direct: Whether its files are read and written past the page cache.
        disk: The number of the disk that it is on.

    Raises:
        OffloadError: There is no such folder, it cannot be written, it lies in memory, or it lacks room.
    """

    def __init__(self, nvme_path: str | os.PathLike[str], *, label: str = "states", min_free_bytes: int = 0) -> None:
        self.path, self._label = os.path.realpath(checked_path(nvme_path, "nvme_path", OffloadError)), label
        # The references are weak, so that an unused file gives its space back without ``close``.
        self._files: weakref.WeakSet[SwapFile] = weakref.WeakSet()
        if not os.path.isdir(self.path):
            problem = "is a file" if os.path.exists(self.path) else "does not exist"
            raise OffloadError(f"nvme_path {nvme_path} {problem}: write a folder on a local disk, or make it: mkdir -p")
        mount = mount_of(self.path)
        if mount.in_memory:
            raise OffloadError(
                f"nvme_path {nvme_path} is on {mount.filesystem}, which is memory: write a folder on a disk, or "
                'offload to memory with "device": "cpu"'
            )
        self.direct, self.disk = self._try_files(), os.stat(self.path).st_dev
        if not self.direct:
            log.warning(
                "nvme_path %s: its file system (%s) has no direct I/O; transfers go through the page cache, which "
                "costs memory and time",
                nvme_path,
                mount.filesystem,
            )
        if (free_bytes := self.free_bytes()) < min_free_bytes:
            raise OffloadError(
                f"nvme_path {nvme_path} has {format_byte_size(free_bytes)} free, but "
                f"{format_byte_size(min_free_bytes)} are needed: make room, or write a folder on a larger disk"
            )

    def file(self, name: str, nbytes: int, *, allocated: bool = True) -> SwapFile:
        """Return a new file of this process, which holds zeros.

        Args:
            name: Its name in messages.
            nbytes: Its size, rounded up to a multiple of 4096.
            allocated: Whether its space is allocated at once, and not by ``SwapFile.allocate``.

        Raises:
            OffloadError: There is no room for it.
        """
        nbytes = round_up_to_block(nbytes)
        path = self._path_of(name)
        file = SwapFile(path, nbytes, self._open(path, direct=self.direct))
        if not allocated:
            os.ftruncate(file.descriptors.buffered, nbytes)
        # This check comes first, because posix_fallocate would fill the disk before it fails.
        elif nbytes > self.free_bytes():
            raise file.no_room(nbytes, os.strerror(errno.ENOSPC))
        else:
            file.allocate(0, nbytes)
        self._files.add(file)
        return file

    def free_bytes(self) -> int:
        """Return the bytes that this process may still write to the folder's disk."""
        stats = os.statvfs(self.path)
        return stats.f_bavail * stats.f_frsize

    def close(self) -> None:
        """Close every file. The space comes back once no transfer and no mapped tensor uses it."""
        for file in list(self._files):
            file.close()

    def _path_of(self, name: str) -> str:
        return os.path.join(self.path, f"zeroengine-{os.getpid()}-{self._label}-{name}")

    def _open(self, path: str, direct: bool) -> Descriptors:
        """Open a new file and unlink it.

        Args:
            path: The start of its name. A random part follows.
            direct: Whether to open it with O_DIRECT as well, if the file system allows it.

        Raises:
            OffloadError: Files cannot be made here.
        """
        # O_EXCL and a random name keep two processes of one folder from opening the same file.
        name = f"{path}-{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            descriptors = Descriptors(os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600))
            # Only the second descriptor still needs the name.
            try:
                if direct and hasattr(os, "O_DIRECT"):
                    with contextlib.suppress(OSError):
                        descriptors.direct = os.open(name, flags | os.O_DIRECT)
            finally:
                os.unlink(name)
        except OSError as error:
            problem = {
                errno.EROFS: "is on a read-only file system",
                errno.EACCES: "cannot be written by this user",
                errno.EPERM: "cannot be written by this user",
                errno.ENOSPC: "is on a full disk",
            }.get(error.errno or 0, f"cannot hold files ({error.strerror})")
            raise OffloadError(
                f"nvme_path {self.path} {problem}: write a folder on a disk that can be written"
            ) from None
        return descriptors

    def _try_files(self) -> bool:
        """Make a file, and return whether direct I/O works on it.

        Some file systems let files be opened with O_DIRECT and refuse the first transfer.

        Raises:
            OffloadError: Files cannot be made here at all.
        """
        # The trial file vanishes with its descriptors when this method returns.
        descriptors = self._open(self._path_of("try"), direct=True)
        if descriptors.direct < 0:
            return False
        # A mapped page has the alignment that O_DIRECT needs.
        with mmap.mmap(-1, ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
            try:
                written, read = (move(descriptors.direct, [page], 0) for move in (os.pwritev, os.preadv))
                return written == read == ALIGNMENT
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return False
                raise OffloadError(f"nvme_path {self.path} cannot be written: {error.strerror}") from None


class SwapFile:
    """A file of a ``SwapFolder``. Its space is freed when nothing uses it any more.

    Attributes:
        path: Its name in messages; ``ls`` does not show it.
        nbytes: Its size in bytes, a multiple of 4096.
        direct: Whether it is read and written past the page cache.
    """

    def __init__(self, path: str, nbytes: int, descriptors: Descriptors) -> None:
        self.path, self.nbytes, self.direct = path, nbytes, descriptors.direct >= 0
        self._descriptors: Descriptors | None = descriptors

    @property
    def descriptors(self) -> Descriptors:
        """The open descriptors.

        Raises:
            OffloadError: The file is closed.
        """
        if self._descriptors is None:
            raise OffloadError(f"{self.path} is closed")
        return self._descriptors

    def allocate(self, offset_bytes: int, nbytes: int) -> None:
        """Give a part of the file space on the disk, as far as it has none.

        Raises:
            OffloadError: The file is closed, or there is no room.
        """
        try:
            if nbytes:
                os.posix_fallocate(self.descriptors.buffered, offset_bytes, nbytes)
        except OSError as error:
            raise self.no_room(nbytes, os.strerror(error.errno or 0)) from None

    def no_room(self, nbytes: int, problem: str) -> OffloadError:
        """Return the error of a disk that cannot give the file ``nbytes`` bytes."""
        stats = os.fstatvfs(self.descriptors.buffered)
        return OffloadError(
            f"{self.path} needs {format_byte_size(nbytes)}, but cannot have them ({problem}; its disk has "
            f"{format_byte_size(stats.f_bavail * stats.f_frsize)} free): make room, or write an nvme_path on a larger "
            "disk"
        )

    def mapped(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor that is a mapped part of the file.

        The kernel keeps the mapping and direct transfers coherent as long as the two do not overlap in time. Pages that
        are touched count as this process's memory until ``release_mapped``. Use ``populate`` first: see the note on
        SIGBUS in ``mapped_memory``.

        Args:
            offset_bytes: The offset of the tensor in the file, a multiple of the dtype's size.
            numel: The number of elements.
            dtype: Their dtype.

        Raises:
            OffloadError: The file is closed, or the system refuses.
        """
        nbytes = numel * dtype.itemsize
        assert offset_bytes % dtype.itemsize == 0 and 0 <= offset_bytes <= self.nbytes - nbytes, (offset_bytes, nbytes)
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        # A mapping begins at a page, the tensor anywhere within it.
        offset_in_page = offset_bytes % mmap.ALLOCATIONGRANULARITY
        try:
            mapping = mapped_memory.MappedFile(
                self.descriptors.buffered, offset_in_page + nbytes, offset=offset_bytes - offset_in_page
            )
        except OSError as error:
            raise OffloadError(f"{self.path} cannot be mapped: {error.strerror}") from None
        tensor = torch.frombuffer(mapping, dtype=dtype, count=numel, offset=offset_in_page)
        mapped_memory.register(tensor, mapping)
        return tensor

    def close(self) -> None:
        """Close the file. Transfers under way and mapped tensors stay valid, and keep the space until they end."""
        # The descriptors themselves are closed with their last reference. See ``Descriptors``.
        self._descriptors = None
