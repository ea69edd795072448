"""Files that are written once, from start to end, and are on the disk when they are closed.

Guarantees: ``close`` syncs a file (``fsync``) before it returns, so what was written survives a power cut; syncing the
folder that holds its name is the caller's part. ``DirectFile`` writes past the page cache with O_DIRECT in aligned
buffers, pads the last one to the alignment, and cuts the file to its true size afterwards. It takes no space from the
disk that the file does not need, apart from one buffer's padding: other files may be written beside it, and the space
may be just enough for all. A file whose ``close`` raised or never ran holds a part of its bytes.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from typing import Any

import torch

from zeroengine.disk.aligned_memory import aligned_zeros, round_up_to_block
from zeroengine.disk.mounts import mount_of
from zeroengine.disk.queue import Descriptors, DiskQueue, Transfer
from zeroengine.errors import OffloadError
from zeroengine.ops import _aio_library as _aio

BUFFER_BYTES, NUM_BUFFERS = 4 << 20, 4
# Local file systems whose fallocate() takes space without writing it. On others the page cache serves better.
DIRECT_FILESYSTEMS = ("ext4", "xfs", "btrfs", "f2fs", "overlay")


def create(path: str | os.PathLike[str], known_bytes: int = 0) -> DirectFile | SyncedFile:
    """Return a new file, or one in the place of another: a ``DirectFile`` on a local disk.

    Args:
        path: Its path.
        known_bytes: As of ``DirectFile``.

    Raises:
        OSError: It cannot be made.
    """
    if hasattr(os, "O_DIRECT") and mount_of(os.path.dirname(os.path.abspath(path))).filesystem in DIRECT_FILESYSTEMS:
        # Without the disk library the page cache serves.
        with contextlib.suppress(OffloadError):
            _aio.library()
            return DirectFile(path, known_bytes)
    # The pages of an earlier file are written over, because new ones would take longer than what is written.
    return SyncedFile(io.FileIO(path, "w", opener=lambda name, flags: os.open(name, flags & ~os.O_TRUNC, 0o666)))


class SyncedFile(io.BufferedWriter):
    """A file that goes through the page cache. ``close`` cuts it to what was written, and syncs it."""

    def close(self) -> None:
        """Write what is buffered, cut off what the file held before, sync and close."""
        if not self.closed:
            self.truncate()
            os.fsync(self.fileno())
        super().close()


class DirectFile(io.RawIOBase):
    """A file that is written past the page cache while its next bytes are made. Takes 16 MiB of memory.

    ``write`` fills buffers in turn; a full one is sent to the disk while the next is filled. A file that fits in one
    buffer starts no queue and goes through the page cache.

    Its errors are ``OSError``, as of any file. Where a ``with`` block ends with another exception, the file is left
    unfinished and not synced.

    Args:
        path: Its path.
        known_bytes: What will be written for certain. This much of the disk is allocated before the first transfer, so
            that the file lies in few extents.

    Attributes:
        path: Its path.
        nbytes: A bound for the queue, which refuses transfers behind the end of a file: this one grows.
        descriptors: Its open descriptors.
    """

    nbytes = 1 << 62

    def __init__(self, path: str | os.PathLike[str], known_bytes: int = 0) -> None:
        self.path, self._known_bytes = os.fspath(path), known_bytes
        flags = os.O_RDWR | os.O_CLOEXEC
        self.descriptors = Descriptors(os.open(path, flags | os.O_CREAT | os.O_TRUNC, 0o666))
        # Where O_DIRECT is refused the blocks pass through the page cache.
        with contextlib.suppress(OSError):
            self.descriptors.direct = os.open(path, flags | os.O_DIRECT)
        self._queue: DiskQueue | None = None
        self._buffers = [aligned_zeros(BUFFER_BYTES, torch.uint8) for _ in range(NUM_BUFFERS)]
        self._views = [buffer.numpy().data for buffer in self._buffers]
        self._writes: list[Transfer | None] = [None] * NUM_BUFFERS
        self._current = 0
        self._filled_bytes = 0
        self._sent_bytes = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Append a copy of ``data``, any contiguous buffer, and return its size in bytes.

        Waits for the disk where it has fallen behind by all buffers.
        """
        # The caller may change ``data`` as soon as this returns, so its bytes are copied into a buffer.
        source = memoryview(data).cast("B")
        done = 0
        while done < len(source):
            count = min(len(source) - done, BUFFER_BYTES - self._filled_bytes)
            self._views[self._current][self._filled_bytes : self._filled_bytes + count] = source[done : done + count]
            self._filled_bytes += count
            done += count
            if self._filled_bytes == BUFFER_BYTES:
                self._send(BUFFER_BYTES)
        return done

    def tell(self) -> int:
        """Return the bytes written so far."""
        return self._sent_bytes + self._filled_bytes

    def close(self) -> None:
        """Write the rest, sync and close."""
        if self.closed:
            return
        size = self.tell()
        # A file that fits in one buffer never started a queue: a thread would cost more than it saves.
        try:
            if self._queue is None:
                self._write_through_the_page_cache()
            else:
                self._finish_transfers(size)
            # O_DIRECT passes by the page cache, not by the disk's own cache, and never syncs the size.
            os.fsync(self.descriptors.buffered)
        finally:
            self._release()

    def _write_through_the_page_cache(self) -> None:
        """Write a file that fits in one buffer."""
        rest = self._views[0][: self._filled_bytes]
        try:
            while rest:
                rest = rest[os.write(self.descriptors.buffered, rest) :]
        except OSError as error:
            error.filename = self.path
            raise

    def _finish_transfers(self, size: int) -> None:
        """Send the last buffer padded to the alignment, wait for all of them, and cut the file to ``size`` bytes."""
        if self._filled_bytes:
            padded = round_up_to_block(self._filled_bytes)
            self._views[self._current][self._filled_bytes : padded] = bytes(padded - self._filled_bytes)
            self._send(padded)
        for i in range(NUM_BUFFERS):
            self._wait(i)
        # The padding of the last block is cut off.
        os.ftruncate(self.descriptors.buffered, size)

    def _send(self, nbytes: int) -> None:
        """Start to write the first ``nbytes`` of the current buffer, and make the next one current once it is free."""
        if self._queue is None:
            self._queue = DiskQueue()
            # Only an optimization: where the disk is full the write below says so. Nothing is known of most files, and
            # the system refuses to allocate 0 bytes.
            with contextlib.suppress(OSError):
                os.posix_fallocate(self.descriptors.buffered, 0, self._known_bytes)
        i = self._current
        self._writes[i] = self._queue.write(self, self._sent_bytes, self._buffers[i][:nbytes])
        self._sent_bytes += self._filled_bytes
        # The next buffer may still be on its way to the disk from its last use.
        self._current, self._filled_bytes = (i + 1) % NUM_BUFFERS, 0
        self._wait(self._current)

    def _wait(self, i: int) -> None:
        """Wait for the write from buffer ``i``, if there is one."""
        write, self._writes[i] = self._writes[i], None
        if write is None:
            return
        try:
            write.wait_host()
        except OffloadError as error:
            code = error.errno or errno.EIO
            raise OSError(code, os.strerror(code), self.path) from error

    def _release(self) -> None:
        """Close without a sync. Of several errors the first is raised, so those of the remaining writes are dropped."""
        super().close()
        for write in filter(None, self._writes):
            with contextlib.suppress(OffloadError):
                write.wait_host()
        if self._queue is not None:
            self._queue.close()
        # Each transfer holds the descriptors, too, so they are closed when the last one is done.
        del self.descriptors, self._buffers, self._views

    def __enter__(self) -> DirectFile:
        """Return the file itself."""
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        """Close the file; after an exception without finishing it."""
        if error_type is None:
            self.close()
        elif not self.closed:
            self._release()
