"""Asynchronous reads and writes of tensors: a queue over io_uring or threads.

Guarantees: A transfer between a file opened with O_DIRECT and an ``aligned_zeros`` bypasses the page cache and copies
nothing. The kernel refuses O_DIRECT unless file offset, memory address and size are multiples of ``ALIGNMENT``. Other
reads bypass the page cache too, and are copied once in the library's threads. Of writes the library moves the unaligned
end as a block of its own through the page cache, and the last page of an ``aligned_zeros`` as a whole. Writes are not
synced: a crash of the machine loses them.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from zeroengine.disk.aligned_memory import ALIGNMENT, owns_last_page, round_up_to_block
from zeroengine.errors import OffloadError
from zeroengine.ops import _aio_library as _aio
from zeroengine.utils.process_finalizer import finalize

log = logging.getLogger("zeroengine")

DEFAULT_DEPTH, DEFAULT_BLOCK_BYTES = 16, 1 << 20
MAX_DEPTH, MAX_BLOCK_BYTES = 4096, 1 << 30
SIGNAL_POLL_MS = 200


class Descriptors:
    """The open descriptors of one file.

    They are closed with the last reference to this object. The file and each of its transfers hold a reference, so a
    file may be closed while transfers are under way: no other file gets the descriptor numbers before they are done.

    Attributes:
        buffered: The descriptor that goes through the page cache.
        direct: The descriptor opened with O_DIRECT, or -1.
    """

    def __init__(self, buffered: int, direct: int = -1) -> None:
        self.buffered, self.direct = buffered, direct

    # ``close`` is bound here because ``os`` may be gone when the interpreter exits.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close both descriptors."""
        for descriptor in (self.buffered, self.direct):
            if descriptor >= 0:
                close(descriptor)


class DiskFile(Protocol):
    """A file that a ``DiskQueue`` can read and write, such as a ``SwapFile``.

    Attributes:
        path: The name in error messages.
        nbytes: The size in bytes.
    """

    path: str
    nbytes: int

    @property
    def descriptors(self) -> Descriptors:
        """The open descriptors."""


class TransferTimes(NamedTuple):
    """When a transfer was under way, in seconds of ``perf_counter``. It may have ended before it was seen to."""

    write: bool
    nbytes: int
    begin: float
    end: float


class Transfer:
    """A read or write under way: the ``Work`` of a ``DiskQueue``. Holds its tensor and its file until it is done."""

    def __init__(
        self,
        handle: int,
        write: bool,
        path: str,
        offset: int,
        resources: tuple[Descriptors, Tensor],
        timeline: list[TransferTimes] | None,
    ) -> None:
        self._handle, self._write, self._path, self._offset = handle, write, path, offset
        self._timeline, self._began = timeline, 0.0 if timeline is None else time.perf_counter()
        # The size is kept for messages, because the tensor is dropped when the transfer is done.
        self._nbytes = resources[1].nbytes
        self._resources: tuple[Descriptors, Tensor] | None = resources
        self._library, self._process = _aio.library(), os.getpid()
        self._lock = threading.Lock()
        self._error: str | None = None
        self._errno = 0
        self._error_raised = False

    def wait_host(self) -> None:
        """Return once the data is in the tensor (a read), or later reads of the file see it (a write).

        Raises:
            OffloadError: The transfer failed. The message names the operation, the path, the offset in bytes and the
                system's reason.
        """
        self._check_process()
        # Python runs no signal handlers during the library's wait, so it returns every SIGNAL_POLL_MS to let Ctrl-C
        # and others be handled.
        with self._lock:
            while not self._poll(SIGNAL_POLL_MS):
                pass
        if self._error is not None:
            self._error_raised = True
            failure = OffloadError(self._error)
            failure.errno = self._errno
            raise failure

    wait_stream = wait_host

    def done(self) -> bool:
        """Return whether ``wait_host`` would return, or raise, at once."""
        self._check_process()
        if not self._lock.acquire(blocking=False):
            # Another thread waits for this transfer, so it is still under way.
            return False
        try:
            return self._poll(0)
        finally:
            self._lock.release()

    def _poll(self, timeout_ms: int) -> bool:
        """Return whether the transfer is done, after waiting for at most ``timeout_ms``. The lock is held."""
        if self._resources is None:
            return True
        result = _aio.Result()
        if not self._library.ze_aio_wait(self._handle, timeout_ms, ctypes.byref(result)):
            return False
        # The kernel no longer uses the tensor or the descriptors.
        self._resources = None
        if self._timeline is not None:
            self._timeline.append(TransferTimes(self._write, self._nbytes, self._began, time.perf_counter()))
        if result.error:
            self._error, self._errno = self._describe(result.error, result.error_offset), max(result.error, 0)
        return True

    def _check_process(self) -> None:
        if self._resources is not None:
            _check_process(self._process)

    def _describe(self, error: int, error_offset: int) -> str:
        """Return the message of a failure at ``error_offset`` bytes of the file."""
        verb, preposition = ("writing", "to") if self._write else ("reading", "from")
        failure = (
            f"{verb} {self._nbytes:,} bytes {preposition} {self._path} at offset {self._offset:,} failed "
            f"at offset {error_offset:,}"
        )
        if error == _aio.NO_PROGRESS:
            return f"{failure}: {'nothing more was taken' if self._write else 'the file ends there'}"
        name = errno.errorcode.get(error, str(error))
        hint = ": make room on its disk, or choose another nvme_path" if error in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{failure}: {os.strerror(error)} ({name}){hint}"

    def __del__(self) -> None:
        """Release the library's part, and log an error that was never raised."""
        # In a forked child the library's transfer belongs to threads of the parent.
        if self._process != os.getpid():
            return
        if self._error is not None and not self._error_raised:
            log.error("%s, and nobody waited for it", self._error)
        self._library.ze_aio_release(self._handle)


# [Note: Order of transfers]
# Transfers overtake each other. If two overlap, in a file or in memory, wait for the first before starting the second.
# No other order is guaranteed.
#
# [Note: Fork and exit]
# A queue belongs to the process that made it, because a fork copies no threads: in a forked child every use is an
# error, and nothing is closed there. A queue that is garbage-collected, or alive when the interpreter exits, first
# waits for its transfers: otherwise its threads would write into unmapped memory.
class DiskQueue:
    """A queue of reads and writes that overlap the computation, any number at once, from any thread.

    A transfer is split into blocks. The library's own threads keep ``depth`` of them in flight, so a transfer proceeds
    while Python computes. Reads and writes take turns.

    Transfers overtake each other: if two overlap, wait for the first before starting the second. A forked child cannot
    use the queue. See the notes above.

    Args:
        depth: Blocks in flight, 1 to 4096.
        block_bytes: The size of a block in bytes, a multiple of 4096 up to 1 GiB.
        backend: "io_uring", "threads" (one for each block in flight), or "auto", the first that works.

    Attributes:
        backend: The backend in use, never "auto".
        bytes_read: Bytes of all reads started.
        bytes_written: Bytes of all writes started.
        unaligned_bytes: Bytes of memory that unaligned reads go through, once there were any.
        timeline: The times of finished transfers that began while this was a list; None keeps no times.

    Raises:
        OffloadError: The backend does not work on this machine.
    """

    def __init__(
        self, depth: int = DEFAULT_DEPTH, block_bytes: int = DEFAULT_BLOCK_BYTES, backend: str = "auto"
    ) -> None:
        # The configuration has checked what users write.
        assert 1 <= depth <= MAX_DEPTH and ALIGNMENT <= block_bytes <= MAX_BLOCK_BYTES and not block_bytes % ALIGNMENT
        library, queue = _aio.library(), ctypes.c_void_p()
        # "auto" is resolved by the library, which tries each backend on this kernel.
        status = library.ze_aio_open(_aio.BACKENDS[backend], depth, block_bytes, ctypes.byref(queue))
        if status:
            raise OffloadError(
                f"backend {backend!r} does not work on this machine ({os.strerror(-status)}); "
                f'write "auto", or one of {", ".join(_aio.available())}'
            )
        assert queue.value is not None
        codes = {code: name for name, code in _aio.BACKENDS.items()}
        self.backend: str = codes[library.ze_aio_backend(queue)]
        self.depth, self.block_bytes = depth, block_bytes
        self.bytes_read = self.bytes_written = self.unaligned_bytes = 0
        self.timeline: list[TransferTimes] | None = None
        self._library, self._queue, self._process = library, queue.value, os.getpid()
        self._lock = threading.Lock()
        self._under_way: deque[Transfer] = deque()
        # Runs once: by ``close``, with the last reference, or when the interpreter exits.
        self._close = finalize(self, _close_queue, library, queue.value, self._under_way)

    def read(self, file: DiskFile, offset_bytes: int, into: Tensor) -> Transfer:
        """Start to fill ``into`` from ``file``. Nothing may use the tensor until the transfer has been awaited.

        Args:
            file: The file to read.
            offset_bytes: The offset of the data in the file.
            into: A contiguous CPU tensor of any shape and dtype.

        Raises:
            OffloadError: The file or the queue is closed.
        """
        return self._start(False, file, offset_bytes, into)

    def write(self, file: DiskFile, offset_bytes: int, source: Tensor) -> Transfer:
        """Start to write ``source`` to ``file``. Nothing may change the tensor until the transfer has been awaited.

        If an ``aligned_zeros`` is written to its end, the file is overwritten to the next multiple of 4096.

        Args:
            file: The file to write.
            offset_bytes: The offset in the file that the data is written to, a multiple of 4096.
            source: A contiguous CPU tensor of any shape and dtype.

        Raises:
            OffloadError: As for ``read``.
        """
        return self._start(True, file, offset_bytes, source)

    def close(self) -> None:
        """Wait for the transfers under way, and end. ``wait_host`` of each transfer still raises its error."""
        if self._process == os.getpid():
            with self._lock:
                self._close()

    def _start(self, write: bool, file: DiskFile, offset: int, tensor: Tensor) -> Transfer:
        _check_process(self._process)
        nbytes, descriptors = tensor.nbytes, file.descriptors
        assert tensor.device.type == "cpu" and tensor.is_contiguous(), (tensor.device, tensor.stride())
        assert 0 <= offset <= file.nbytes - nbytes, (file.path, offset, nbytes, file.nbytes)
        assert not (write and offset % ALIGNMENT), (file.path, offset)
        is_aligned = not (offset | tensor.data_ptr()) % ALIGNMENT
        if descriptors.direct >= 0 and not is_aligned:
            self.unaligned_bytes = self.depth * self.block_bytes
        # A whole last page keeps the transfer within O_DIRECT.
        moved_bytes = nbytes
        if is_aligned and owns_last_page(tensor):
            moved_bytes = min(round_up_to_block(nbytes), file.nbytes - offset)
        # The lock keeps the queue from being closed by another thread between the check and the submission.
        with self._lock:
            if not self._close.alive:
                raise OffloadError(f"the disk queue is closed: make another for {file.path}")
            # The queue keeps its transfers, and so their tensors, alive until they are done. Finished ones are dropped
            # here, oldest first.
            while self._under_way and self._under_way[0].done():
                self._under_way.popleft()
            handle = self._library.ze_aio_submit(
                self._queue, write, descriptors.buffered, descriptors.direct, tensor.data_ptr(), moved_bytes, offset
            )
            if not handle:
                raise MemoryError(f"no memory for a transfer of {file.path}")
            transfer = Transfer(handle, write, file.path, offset, (descriptors, tensor), self.timeline)
            self._under_way.append(transfer)
            if write:
                self.bytes_written += nbytes
            else:
                self.bytes_read += nbytes
        return transfer

    def __enter__(self) -> DiskQueue:
        """Return the queue itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the queue."""
        self.close()


def _close_queue(library: Any, queue: int, under_way: deque[Transfer]) -> None:
    """Close a queue. This is no method, because it runs after the queue object is gone."""
    library.ze_aio_close(queue)
    while under_way:
        # Polling fetches the result, so that an error that was never raised is logged.
        under_way.popleft().done()


def _check_process(process: int) -> None:
    """Raise where this process is a forked child of ``process``."""
    if process != os.getpid():
        raise OffloadError(f"a disk queue of process {process} was used in its child {os.getpid()}: make one there")
