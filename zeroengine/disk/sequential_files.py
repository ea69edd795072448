"""Files that are written once, from start to end, and are on the disk when they are closed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
from typing import Any, TypeAlias

import torch

from zeroengine.disk.mounts import mount_of
from zeroengine.disk.queue import Descriptors, DiskQueue, Transfer, aligned_empty, round_up
from zeroengine.errors import OffloadError
from zeroengine.ops import _aio_library as _aio

BUFFER_BYTES, NUM_BUFFERS = 4 << 20, 4
AHEAD = 256 << 20  # bytes of the disk that are taken before they are written
# Local ones, whose fallocate() takes space without writing it. Elsewhere the page cache serves better.
FILESYSTEMS = ("ext4", "xfs", "btrfs", "f2fs", "overlay")


def create(path: str | os.PathLike[str]) -> SequentialFile:
    """A new file, or an empty one in the place of another; on a local disk past the page cache.

    Raises:
        OSError: it cannot be made.
    """
    if hasattr(os, "O_DIRECT") and mount_of(os.path.dirname(os.path.abspath(path))).filesystem in FILESYSTEMS:
        with contextlib.suppress(OffloadError):  # no library
            _aio.library()
            return DirectFile(path)
    return SyncedFile(io.FileIO(path, "w"))


class SyncedFile(io.BufferedWriter):
    """One in the page cache until ``close``."""

    def close(self) -> None:
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
        super().close()


class DirectFile(io.RawIOBase):
    """One that is written past the page cache, beside the work that makes its bytes. Takes 16 MiB of memory.

    Its errors are ``OSError``, as of any file. Where a ``with`` ends with another exception, part of it is written.
    """

    nbytes = 1 << 62  # for the queue: it grows

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        flags = os.O_RDWR | os.O_CLOEXEC
        self.descriptors = Descriptors(os.open(path, flags | os.O_CREAT | os.O_TRUNC, 0o666))
        with contextlib.suppress(OSError):  # then its blocks pass through the page cache
            self.descriptors.direct = os.open(path, flags | os.O_DIRECT)
        self._queue: DiskQueue | None = None  # a small file needs none
        self._buffers = [aligned_empty(BUFFER_BYTES, torch.uint8) for _ in range(NUM_BUFFERS)]
        self._views = [_bytes_of(buffer) for buffer in self._buffers]
        self._writes: list[Transfer | None] = [None] * NUM_BUFFERS
        self._current = 0  # of the buffers: the one being filled
        self._filled = 0  # bytes of it
        self._end = 0  # of the file: where it goes
        self._taken = 0  # of the disk, in bytes

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Appends a copy of ``data``. Waits for the disk where it has fallen behind by all buffers."""
        source = memoryview(data).cast("B")
        done = 0
        while done < len(source):
            count = min(len(source) - done, BUFFER_BYTES - self._filled)
            self._views[self._current][self._filled : self._filled + count] = source[done : done + count]
            self._filled += count
            done += count
            if self._filled == BUFFER_BYTES:
                self._send(BUFFER_BYTES)
        return done

    def tell(self) -> int:
        """Bytes written so far."""
        return self._end + self._filled

    def close(self) -> None:
        if self.closed:
            return
        size = self.tell()
        try:
            if self._queue is None:
                self._write_through_the_page_cache()
            else:
                self._end_transfers(size)
            os.fsync(self.descriptors.buffered)
        finally:
            self._let_go()

    def _write_through_the_page_cache(self) -> None:
        left = self._views[0][: self._filled]
        try:
            while left:
                left = left[os.write(self.descriptors.buffered, left) :]
        except OSError as error:
            error.filename = self.path
            raise

    def _end_transfers(self, size: int) -> None:
        if self._filled:
            last = round_up(self._filled)
            self._views[self._current][self._filled : last] = bytes(last - self._filled)
            self._send(last)
        for i in range(NUM_BUFFERS):
            self._wait(i)
        os.ftruncate(self.descriptors.buffered, size)

    def _send(self, nbytes: int) -> None:
        if self._queue is None:
            self._queue = DiskQueue()
        if self._end + nbytes > self._taken:
            with contextlib.suppress(OSError):  # the write says what is wrong, if anything is
                os.posix_fallocate(self.descriptors.buffered, self._end, AHEAD)
            self._taken = self._end + AHEAD
        i = self._current
        self._writes[i] = self._queue.write(self, self._end, self._buffers[i][:nbytes])
        self._end += self._filled
        self._current, self._filled = (i + 1) % NUM_BUFFERS, 0
        self._wait(self._current)

    def _wait(self, i: int) -> None:
        write, self._writes[i] = self._writes[i], None
        if write is None:
            return
        try:
            write.wait_host()
        except OffloadError as error:
            code = error.errno or errno.EIO
            raise OSError(code, os.strerror(code), self.path) from error

    def _let_go(self) -> None:
        super().close()
        for write in filter(None, self._writes):
            with contextlib.suppress(OffloadError):  # of several errors the first is raised
                write.wait_host()
        if self._queue is not None:
            self._queue.close()
        del self.descriptors, self._buffers, self._views

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self.closed:
            self._let_go()


def _bytes_of(buffer: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr())).cast("B")


SequentialFile: TypeAlias = "DirectFile | SyncedFile"
