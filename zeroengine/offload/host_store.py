"""States of a GPU that live in CPU memory, or on a disk behind it. The CPU uses them in place."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from zeroengine.comm.buffer_pool import BufferPool
from zeroengine.offload.device_copies import GPUCopies
from zeroengine.offload.disk_store import DiskStore
from zeroengine.offload.interfaces import Medium, OffloadStore, padded_nbytes
from zeroengine.utils.work import Work


class HostStore:
    """An ``OffloadStore`` in CPU memory, for states of a GPU."""

    medium: Medium = "cpu"

    def __init__(self, copies: GPUCopies) -> None:
        self.copies = copies
        # The addresses of the states' storages.
        self._states: set[int] = set()

    def empty(self, numel: int, dtype: torch.dtype, *, allocated: bool = True) -> torch.Tensor:
        """Return a new state in host memory that can be copied fast."""
        state = self.copies.host_memory(numel, dtype)
        self._states.add(state.untyped_storage().data_ptr())
        return state

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a state of this store, or a part of one."""
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._states

    def fill(self, state: torch.Tensor, values: torch.Tensor) -> None:
        """Copy ``values`` over a state."""
        state.copy_(values)

    def read(self, state: torch.Tensor, into: torch.Tensor) -> Work:
        """Start to copy a state to the device."""
        return self.copies.copy(into, state)

    def write(self, source: torch.Tensor, state: torch.Tensor) -> Work:
        """Start to copy a state from the device."""
        return self.copies.copy(state, source)

    def evict(self, *states: torch.Tensor) -> None:
        """Do nothing: using states in place takes no memory."""

    def poison(self, error: BaseException) -> None:
        """Do nothing: a copy that fails ends the CUDA context."""

    def close(self) -> None:
        """Do nothing: the states free their memory themselves."""


class DeviceStates:
    """The device as a ``StateStore`` for a ``Pipeline``: it holds every state that none of ``others`` holds."""

    def __init__(self, copies: GPUCopies, others: Sequence[OffloadStore]) -> None:
        self._copies, self._others = copies, others

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether no other store holds ``tensor``."""
        return not any(other.holds(tensor) for other in self._others)

    def read(self, state: torch.Tensor, into: torch.Tensor) -> Work:
        """Start to copy a state from the device into host memory."""
        return self._copies.copy(into, state)

    def write(self, source: torch.Tensor, state: torch.Tensor) -> Work:
        """Start to copy host memory over a state on the device."""
        return self._copies.copy(state, source)

    def poison(self, error: BaseException) -> None:
        """Do nothing: a copy that fails ends the CUDA context."""


# [Note: Two threads]
# A read is a disk transfer and then a copy to the device. A write is a copy from the device and then a disk transfer. A
# thread starts the second half when the first is done, so that the caller never waits. Reads and writes have separate
# threads: a write's copy waits for kernels of the device, which may wait for a read, so one thread could deadlock.
class StagedDiskStore:
    """An ``OffloadStore`` on a disk for states of a GPU. Transfers go through buffers in host memory.

    Args:
        disk: The store on the disk.
        copies: Between host and device.
        num_buffers: The number of transfers of one size that may be under way at once.
    """

    medium: Medium = "nvme"

    def __init__(self, disk: DiskStore, copies: GPUCopies, num_buffers: int) -> None:
        self._disk, self.copies = disk, copies
        # States are made, found and used in place on the disk.
        self.empty, self.holds, self.fill, self.evict, self.poison = (
            *(disk.empty, disk.holds, disk.fill, disk.evict, disk.poison),
        )
        self._buffers: BufferPool[_ChainedTransfer] = BufferPool(
            self._host_memory, _ChainedTransfer.is_over, enough=num_buffers, largest_multiple=math.inf
        )
        # By the state's address. Buffers keep writes alive until they are awaited.
        self._writes: weakref.WeakValueDictionary[int, _ChainedTransfer] = weakref.WeakValueDictionary()
        # A write's first half waits for the device, and a read's first half for the disk. See the note above.
        self._reader, self._writer = (_TransferThread(f"zeroengine-{name}") for name in ("read", "write"))

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the buffers take."""
        return self._buffers.nbytes

    def read(self, state: torch.Tensor, into: torch.Tensor) -> Work:
        """Start to read a state from the disk to the device."""
        # The last write may not have reached the disk yet.
        self._finish_write(state)
        host = self._buffers.take(into.numel(), into.dtype)
        # Another thread, with another current stream, issues the copy, so an event orders it.
        issued, disk_read = self.copies.record_event(), self._disk.read(state, host)
        transfer = _ChainedTransfer(self._reader.submit(self._copy_in, disk_read, into, host, issued))
        self._buffers.put_back(host, transfer)
        return transfer

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        return self.copies.host_memory(padded_nbytes(nbytes), torch.uint8)

    def _copy_in(self, disk_read: Work, into: torch.Tensor, host: torch.Tensor, after: Work) -> Work:
        disk_read.wait_host()
        return self.copies.copy(into, host, after)

    def write(self, source: torch.Tensor, state: torch.Tensor) -> Work:
        """Start to write a state from the device to the disk."""
        self._finish_write(state)
        host = self._buffers.take(source.numel(), source.dtype)
        # This thread issues the copy, because its current stream has the kernels that write ``source``.
        copied = self.copies.copy(host, source)
        written = _ChainedTransfer(self._writer.submit(self._write_out, copied, host, state), copied)
        # The dictionary's references are weak, so the buffer keeps the write alive.
        self._writes[state.data_ptr()] = written
        self._buffers.put_back(host, written)
        return written

    def _write_out(self, copied: Work, host: torch.Tensor, state: torch.Tensor) -> Work:
        copied.wait_host()
        return self._disk.write(host, state)

    def _finish_write(self, state: torch.Tensor) -> None:
        """Wait for the last write of a state, because disk transfers overtake each other."""
        write = self._writes.pop(state.data_ptr(), None)
        if write is not None:
            write.wait_host()

    def close(self) -> None:
        """End both threads after their tasks, then close the store on the disk."""
        self._reader.close()
        self._writer.close()
        self._disk.close()


class _TransferThread:
    """A thread that starts transfers, one after the other.

    It is a daemon: a transfer that never ends must not keep the interpreter from exiting.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Work], Callable[[], Work]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, start: Callable[..., Work], *arguments: Any) -> Future[Work]:
        """Call ``start`` with ``arguments`` after all earlier tasks."""
        future: Future[Work] = Future()
        self._tasks.put((future, partial(start, *arguments)))
        return future

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, start = task
            try:
                future.set_result(start())
            # The error is raised where the transfer is awaited, and the thread goes on.
            except BaseException as error:
                future.set_exception(error)
            # These names would keep the transfer's tensors alive while the thread waits for the next task.
            del task, future, start

    def close(self) -> None:
        """Wait for all tasks, and end the thread."""
        self._tasks.put(None)
        self._thread.join()


class _ChainedTransfer:
    """Two works as one: a thread starts the second when the first is done.

    Args:
        second: The work that the thread starts.
        device_work: The work of the device, for which streams wait. None: the second.
    """

    def __init__(self, second: Future[Work], device_work: Work | None = None) -> None:
        self._second, self._device_work = second, device_work

    def wait_host(self) -> None:
        """Return when the second is done."""
        self._second.result().wait_host()

    def wait_stream(self) -> None:
        """Order the current stream behind the device's work."""
        # After a write's copy kernels may overwrite its source. They need not wait for the disk.
        (self._second.result() if self._device_work is None else self._device_work).wait_stream()

    def done(self) -> bool:
        """Return whether the second is done, or failed to start."""
        if not self._second.done():
            return False
        # If it failed to start, ``wait_host`` raises at once.
        return self._second.exception() is not None or self._second.result().done()

    def is_over(self, timeout_s: float) -> bool:
        """Return whether the second is done. Any timeout waits for its end: it needs no other rank."""
        if not timeout_s and not self.done():
            return False
        self.wait_host()
        return True
