"""States of a GPU that live in CPU memory, and on a disk behind it. The CPU's part of the work uses them in place."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from zeroengine.offload.device_copies import Copies, Direction
from zeroengine.offload.disk_store import AddressMap, DiskStore, Medium, OffloadStore, padded_nbytes
from zeroengine.utils.work import Work


class HostStore:
    """See ``OffloadStore``."""

    medium: Medium = "cpu"
    stream_ordered = True

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._states = AddressMap[bool]()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        state = self._copies.host_memory(numel, dtype)
        self._states.add(state.data_ptr(), state.nbytes, True)
        return state

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and self._states.at(tensor) is not None

    def fill(self, state: torch.Tensor, values: torch.Tensor) -> None:
        state.copy_(values)

    def staging_buffer(self, nbytes: int) -> torch.Tensor:
        return self._copies.device_memory(nbytes)

    def on_copy_stream(self, direction: Direction) -> AbstractContextManager[Any]:
        return self._copies.on_copy_stream(direction)

    def record_event(self) -> Work:
        return self._copies.record_event()

    def read(self, state: torch.Tensor, into: torch.Tensor) -> Work:
        return self._copies.copy(into, state)

    def write(self, source: torch.Tensor, state: torch.Tensor) -> Work:
        return self._copies.copy(state, source)

    def evict(self, *states: torch.Tensor) -> None: ...

    def poison(self, error: BaseException) -> None: ...


class DeviceStore:
    """The device, as the host sees it: every state that lives in none of ``others``. For a ``Pipeline``."""

    def __init__(self, copies: Copies, others: Sequence[OffloadStore]) -> None:
        self._copies, self._others = copies, others

    def holds(self, tensor: torch.Tensor) -> bool:
        return not any(other.holds(tensor) for other in self._others)

    def read(self, state: torch.Tensor, into: torch.Tensor) -> Work:
        return self._copies.copy(into, state)

    def write(self, source: torch.Tensor, state: torch.Tensor) -> Work:
        return self._copies.copy(state, source)

    def poison(self, error: BaseException) -> None: ...


@dataclass(eq=False)
class _Bounce:
    """Host memory between the two."""

    memory: torch.Tensor  # bytes
    last: Work | None = None  # that used it


class DiskThroughHost:
    """A ``DiskStore`` that a GPU's memory is read into and written from, through host memory. See ``OffloadStore``.

    Args:
        num_buffers: transfers under way at once.
    """

    medium: Medium = "nvme"
    stream_ordered = True

    def __init__(self, disk: DiskStore, copies: Copies, num_buffers: int) -> None:
        self._disk, self._copies, self._num_buffers = disk, copies, num_buffers
        self._bounces: list[_Bounce] = []
        # By the state's address. What nobody holds any more has been waited for.
        self._writing: weakref.WeakValueDictionary[int, _SecondOfTwo] = weakref.WeakValueDictionary()
        # A write waits for the device, which may wait for a read.
        self._reader, self._writer = (_Worker(f"zeroengine-{name}") for name in ("read", "write"))

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._disk.empty(numel, dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._disk.holds(tensor)

    def fill(self, state: torch.Tensor, values: torch.Tensor) -> None:
        self._disk.fill(state, values)

    def evict(self, *states: torch.Tensor) -> None:
        self._disk.evict(*states)

    def poison(self, error: BaseException) -> None:
        self._disk.poison(error)

    def on_copy_stream(self, direction: Direction) -> AbstractContextManager[Any]:
        return self._copies.on_copy_stream(direction)

    def record_event(self) -> Work:
        return self._copies.record_event()

    @property
    def nbytes(self) -> int:
        """Of host memory."""
        return sum(bounce.memory.nbytes for bounce in self._bounces)

    def staging_buffer(self, nbytes: int) -> torch.Tensor:
        return self._copies.device_memory(nbytes)

    def read(self, state: torch.Tensor, into: torch.Tensor) -> Work:
        self._settle(state)
        bounce = self._bounce(into.nbytes)
        part = bounce.memory[: into.nbytes].view(into.dtype)
        here, read = self._copies.record_event(), self._disk.read(state, part)
        bounce.last = _SecondOfTwo(self._reader.submit(self._bring, read, into, part, here))
        return bounce.last

    def _bring(self, read: Work, into: torch.Tensor, part: torch.Tensor, behind: Work) -> Work:
        read.wait_host()
        return self._copies.copy(into, part, behind)

    def write(self, source: torch.Tensor, state: torch.Tensor) -> Work:
        self._settle(state)
        bounce = self._bounce(source.nbytes)
        part = bounce.memory[: source.nbytes].view(source.dtype)
        copied = self._copies.copy(part, source)
        bounce.last = written = _SecondOfTwo(self._writer.submit(self._write, copied, part, state), copied)
        self._writing[state.data_ptr()] = written
        return written

    def _settle(self, state: torch.Tensor) -> None:
        """Waits for the last write of a state: what is under way on a disk has no order."""
        last = self._writing.pop(state.data_ptr(), None)
        if last is not None:
            last.wait_host()

    def _write(self, copied: Work, part: torch.Tensor, state: torch.Tensor) -> Work:
        copied.wait_host()
        return self._disk.write(part, state)

    def _bounce(self, nbytes: int) -> _Bounce:
        """Free memory of at least so many bytes; waits for some where there is enough of it."""
        fitting = [bounce for bounce in self._bounces if bounce.memory.nbytes >= nbytes]
        free = next((bounce for bounce in fitting if bounce.last is None or bounce.last.done()), None)
        if free is None and len(fitting) >= self._num_buffers:
            free = fitting[0]
        if free is None:
            free = _Bounce(self._copies.host_memory(padded_nbytes(nbytes), torch.uint8))
        else:
            self._bounces.remove(free)
        self._bounces.append(free)  # the longest in use first
        last, free.last = free.last, None
        if last is not None:
            last.wait_host()
        return free

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class _Worker:
    """A thread that does one thing after the other. It does not outlive the interpreter, whatever it waits for."""

    def __init__(self, name: str) -> None:
        self._todo: SimpleQueue[tuple[Future[Work], Callable[[], Work]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, begin: Callable[..., Work], *arguments: Any) -> Future[Work]:
        future: Future[Work] = Future()
        self._todo.put((future, partial(begin, *arguments)))
        return future

    def _run(self) -> None:
        while (item := self._todo.get()) is not None:
            future, begin = item
            try:
                future.set_result(begin())
            except BaseException as error:
                future.set_exception(error)
            del item, future, begin  # what they hold, while it waits for the next

    def close(self) -> None:
        self._todo.put(None)
        self._thread.join()


class _SecondOfTwo:
    """A ``Work`` of two, of which a thread begins the second when the first is done.

    Args:
        second: What the thread begins.
        device_work: The one that the device takes part in, for streams to wait for; None: it is the second.
    """

    def __init__(self, second: Future[Work], device_work: Work | None = None) -> None:
        self._second, self._device_work = second, device_work

    def wait_host(self) -> None:
        """Return when the second is done."""
        self._second.result().wait_host()

    def wait_stream(self) -> None:
        """Order the current stream behind the part that the device takes."""
        (self._second.result() if self._device_work is None else self._device_work).wait_stream()

    def done(self) -> bool:
        """Return whether the second is done, or could not be begun."""
        if not self._second.done():
            return False
        return self._second.exception() is not None or self._second.result().done()
