"""Asynchronous reads and writes of tensors: a queue over io_uring, Linux AIO or threads, and buffers made for it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroengine.errors import OffloadError
from zeroengine.ops import _aio_library as _aio
from zeroengine.ops._aio_library import ALIGNMENT

log = logging.getLogger("zeroengine")

DEPTH, BLOCK_BYTES = 16, 1 << 20
MAX_DEPTH, MAX_BLOCK_BYTES = 4096, 1 << 30
HUGE_PAGE = 2 << 20
POLL_MS = 200  # between looks for signals while a transfer is waited for


class Pages(mmap.mmap):
    """Anonymous memory of this process alone."""

    before_end: Callable[[], None] | None = None
    """Called before the memory goes."""
    owner: int | None = None
    """The process that has it, where its forked children do not."""

    def __new__(cls, nbytes: int) -> Pages:
        # A private mapping: the default, a shared one, would be shared with forked children.
        return super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __del__(self) -> None:
        if self.owner not in (None, os.getpid()):
            _foreign.append(self)  # to unmap it would hit whatever this process has there
        elif self.before_end is not None:
            self.before_end()


_foreign: list[Pages] = []
"""Kept for ever."""


_padded: weakref.WeakValueDictionary[int, Pages] = weakref.WeakValueDictionary()
"""The memory behind each `aligned_empty`, by address: to the end of its last page it is nobody else's."""


def round_up(nbytes: int) -> int:
    """To a multiple of the alignment that direct I/O wants, in bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """A new 1-D CPU tensor that direct I/O can read into and write from without a copy.

    Its address is a multiple of 4096 bytes, and so is the memory behind it, which is huge pages where the system has
    them. The memory is zero at first, untouched, and goes with the tensor.
    """
    nbytes = numel * dtype.itemsize
    if nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    padded = round_up(nbytes)
    large = padded >= HUGE_PAGE
    memory = Pages(padded + HUGE_PAGE * large)
    skip = 0
    if large:
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        skip = -address_of(memory) % HUGE_PAGE
    out = torch.frombuffer(memory, dtype=dtype, count=numel, offset=skip)
    _padded[out.data_ptr()] = memory
    return out


def memory_behind(tensor: Tensor) -> Pages:
    """The pages of an `aligned_empty`."""
    return _padded[tensor.untyped_storage().data_ptr()]


def address_of(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()


class Descriptors:
    """The open descriptors of one file, closed with the last reference: the file's own, or that of a transfer.

    `direct` is open with O_DIRECT, or -1.
    """

    def __init__(self, buffered: int, direct: int = -1) -> None:
        self.buffered, self.direct = buffered, direct

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for descriptor in (self.buffered, self.direct):
            if descriptor >= 0:
                close(descriptor)


class DiskFile(Protocol):
    """What can be read and written: a `SwapFile`, say."""

    @property
    def path(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def descriptors(self) -> Descriptors: ...


class Transfer:
    """A read or write under way. Its tensor and its file stay alive until it is done."""

    def __init__(self, handle: int, write: bool, path: str, offset: int, owned: tuple[Descriptors, Tensor]) -> None:
        self._handle, self._write, self._path, self._offset = handle, write, path, offset
        self._nbytes = owned[1].nbytes
        self._owned: tuple[Descriptors, Tensor] | None = owned
        self._library, self._process = _aio.library(), os.getpid()
        self._lock = threading.Lock()
        self._error: str | None = None
        self._errno = 0
        self._told = False

    def wait_host(self) -> None:
        """Returns once the data is where it belongs: in the tensor, or in the file for whoever reads it.

        Raises:
            OffloadError: it failed; names the operation, the path, the offset in bytes and what the system said.
        """
        self._check_process()
        with self._lock:
            while not self._poll(POLL_MS):
                pass
        if self._error is not None:
            self._told = True
            failure = OffloadError(self._error)
            failure.errno = self._errno
            raise failure

    wait_stream = wait_host

    def done(self) -> bool:
        """Return whether `wait_host` would return, or raise, at once."""
        self._check_process()
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits
        try:
            return self._poll(0)
        finally:
            self._lock.release()

    def _poll(self, timeout_ms: int) -> bool:
        if self._owned is None:
            return True
        result = _aio.Result()
        if not self._library.ze_aio_wait(self._handle, timeout_ms, ctypes.byref(result)):
            return False
        self._owned = None
        if result.error:
            self._error, self._errno = self._describe(result.error, result.error_offset), max(result.error, 0)
        return True

    def _check_process(self) -> None:
        if self._owned is not None:
            _check_process(self._process)

    def _describe(self, error: int, offset: int) -> str:
        verb, end = ("writing", "to") if self._write else ("reading", "from")
        what = f"{verb} {self._nbytes:,} bytes {end} {self._path} at offset {self._offset:,} failed"
        if error == _aio.NO_PROGRESS:
            said = "nothing more was taken" if self._write else "the file ends there"
            return f"{what} at offset {offset:,}: {said}"
        name = errno.errorcode.get(error, str(error))
        hint = ": make room on its disk, or choose another nvme_path" if error in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{what} at offset {offset:,}: {os.strerror(error)} ({name}){hint}"

    def __del__(self) -> None:
        if self._process != os.getpid():
            return
        if self._error is not None and not self._told:
            log.error("%s, and nobody waited for it", self._error)
        self._library.ze_aio_release(self._handle)


class DiskQueue:
    """Reads and writes tensors beside the computation: any number of transfers at once, from any thread.

    A transfer is split into blocks, of which `depth` are in flight. A thread of the queue's own keeps them so: a
    transfer gets on while Python computes. Reads and writes take turns. Of two transfers that overlap, in a file or in
    memory, the second must be begun after the first was waited for; no other order is kept.

    Transfers between files opened with O_DIRECT and tensors of `aligned_empty` pass by the page cache and are not
    copied. All others work too, through the page cache.

    A queue that is garbage-collected, or alive when the interpreter exits, first waits for what is under way. It
    belongs to the process that made it: in a forked child every use is an error.
    """

    def __init__(self, depth: int = DEPTH, block_bytes: int = BLOCK_BYTES, backend: str = "auto") -> None:
        """
        Args:
            depth: blocks in flight, 1 to 4096.
            block_bytes: their size, a multiple of 4096 up to 1 GiB.
            backend: "io_uring", "libaio", "threads" (one for each block in flight), or "auto", the first that works.

        Raises:
            OffloadError: a number out of range, or a backend that is unknown or does not work on this machine.
        """
        if not 1 <= depth <= MAX_DEPTH:
            raise OffloadError(f"queue_depth is {depth}; write a number from 1 to {MAX_DEPTH}, such as {DEPTH}")
        if not ALIGNMENT <= block_bytes <= MAX_BLOCK_BYTES or block_bytes % ALIGNMENT:
            raise OffloadError(
                f"block_size is {block_bytes}; write a multiple of {ALIGNMENT} up to {MAX_BLOCK_BYTES}, such as "
                f"{BLOCK_BYTES}"
            )
        if backend not in _aio.BACKENDS:
            raise OffloadError(f"backend is {backend!r}; write one of {', '.join(_aio.BACKENDS)}")
        library, queue = _aio.library(), ctypes.c_void_p()
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
        self.bytes_read = 0
        """Of all reads begun."""
        self.bytes_written = 0
        """Of all writes begun."""
        self._library, self._queue, self._process = library, queue.value, os.getpid()
        self._lock = threading.Lock()
        self._under_way: deque[Transfer] = deque()
        self._close = weakref.finalize(self, _close, library, queue.value, self._under_way, self._process)

    def read(self, file: DiskFile, offset_bytes: int, into: Tensor) -> Transfer:
        """Begins to fill `into` from `file`. Nothing may use the tensor until the transfer was waited for.

        Args:
            offset_bytes: where in the file the data begins, a multiple of 4096.
            into: a contiguous CPU tensor of any shape and dtype.

        Raises:
            OffloadError: a wrong offset or tensor, a file that is too short or closed, or a queue that is.
        """
        return self._begin(False, file, offset_bytes, into)

    def write(self, file: DiskFile, offset_bytes: int, source: Tensor) -> Transfer:
        """Begins to write `source` to `file`. Nothing may change the tensor until the transfer was waited for.

        Where a tensor of `aligned_empty` is written to its end, the file is overwritten to the next multiple of 4096.
        Arguments and errors are those of `read`.
        """
        return self._begin(True, file, offset_bytes, source)

    def close(self) -> None:
        """Wait for what is under way, and end; each `wait_host` says how its transfer went. A no-op in forks."""
        if self._process == os.getpid():
            with self._lock:
                self._close()

    def _begin(self, write: bool, file: DiskFile, offset: int, tensor: Tensor) -> Transfer:
        _check_process(self._process)
        if offset < 0 or offset % ALIGNMENT:
            raise OffloadError(f"offset {offset} in {file.path}: write a multiple of {ALIGNMENT} that is not negative")
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise OffloadError(
                f"a tensor on {tensor.device} with shape {tuple(tensor.shape)} and strides {tensor.stride()} for "
                f"{file.path}: pass a contiguous one on the CPU"
            )
        nbytes, descriptors = tensor.nbytes, file.descriptors
        if offset + nbytes > file.nbytes:
            raise OffloadError(
                f"{nbytes:,} bytes at offset {offset:,} of {file.path}, which has {file.nbytes:,}: make it larger"
            )
        moved = round_up(nbytes) if _owns_its_last_page(tensor) else nbytes
        moved = min(moved, file.nbytes - offset)
        with self._lock:
            if not self._close.alive:
                raise OffloadError(f"the disk queue is closed: make another for {file.path}")
            while self._under_way and self._under_way[0].done():
                self._under_way.popleft()
            handle = self._library.ze_aio_submit(
                self._queue, write, descriptors.buffered, descriptors.direct, tensor.data_ptr(), moved, offset
            )
            if not handle:
                raise MemoryError(f"no memory for a transfer of {file.path}")
            transfer = Transfer(handle, write, file.path, offset, (descriptors, tensor))
            self._under_way.append(transfer)
            if write:
                self.bytes_written += nbytes
            else:
                self.bytes_read += nbytes
        return transfer

    def __enter__(self) -> DiskQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _owns_its_last_page(tensor: Tensor) -> bool:
    """Whether what lies behind the tensor in its last page belongs to it: it is the end of an `aligned_empty`."""
    storage = tensor.untyped_storage()
    end = tensor.data_ptr() + tensor.nbytes
    return storage.data_ptr() in _padded and end == storage.data_ptr() + storage.nbytes()


def _close(library: Any, queue: int, under_way: deque[Transfer], process: int) -> None:
    if process != os.getpid():
        return  # the threads that would end it are the parent's
    library.ze_aio_close(queue)
    while under_way:
        under_way.popleft().done()  # takes note of errors


def _check_process(process: int) -> None:
    if process != os.getpid():
        raise OffloadError(f"a disk queue of process {process} was used in its child {os.getpid()}: make one there")
