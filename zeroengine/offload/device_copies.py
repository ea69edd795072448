"""Copies between a GPU's memory and the host's, beside what both compute."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch

from zeroengine.disk.aligned_memory import Pages, aligned_empty, pages_of
from zeroengine.errors import OffloadError
from zeroengine.utils.work import Work

Direction = Literal["in", "out"]  # into device memory, or out of it


class Copies(Protocol):
    """The ways between one device and the host."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, behind: Work | None = None) -> Work:
        """Starts ``target.copy_(source)``; one of the two is on the host.

        Neither may be written, and ``target`` not be read, before the work is awaited.

        Args:
            behind: What the copy comes behind. None: the work of the current stream, which inside of
                ``on_copy_stream`` is the stream of the copy itself.
        """

    def record_event(self) -> Work:
        """Return a work that is done when everything in the current stream so far is."""

    def on_copy_stream(self, direction: Direction) -> AbstractContextManager[Any]:
        """Make the stream of the copies in that direction the current one, behind what is current now."""

    def wait_stream(self) -> None:
        """Order later kernels of the current stream behind every copy so far."""

    def synchronize(self) -> None:
        """Return once every copy so far is done."""

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """New 1-D host memory of exactly this size, zeros, as fast to copy from and to as there is."""

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """New bytes on the device."""


class RecordedEvent:
    """A ``Work`` that is done when the device reaches an event.

    Its tensors stay alive as long as it does, or until the host has waited.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device, *tensors: torch.Tensor) -> None:
        self._event, self._device, self._tensors = event, device, tensors

    def wait_host(self) -> None:
        """Block the host until the device has reached the event."""
        self._event.synchronize()
        self._tensors = ()

    def wait_stream(self) -> None:
        """Order the current stream behind the event."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def done(self) -> bool:
        """Return whether the device has reached the event."""
        return bool(self._event.query())


class GPUCopies:
    """See ``Copies``: a stream for each way, for a GPU copies both ways at once.

    Args:
        pin: whether host memory is page-locked, without which copies are slower and the host waits for them.
    """

    def __init__(self, device: torch.device, pin: bool = True) -> None:
        self._device, self._pin = device, pin
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, behind: Work | None = None) -> Work:
        stream, current = self._in if target.is_cuda else self._out, torch.cuda.current_stream(self._device)
        if behind is None and current in (self._in, self._out):
            stream = current
        with torch.cuda.stream(stream):
            if behind is not None:
                behind.wait_stream()
            elif stream != current:
                stream.wait_stream(current)
            target.copy_(source, non_blocking=True)
            return RecordedEvent(self._event(), self._device, target, source)

    def record_event(self) -> Work:
        """See ``Copies.record_event``."""
        return RecordedEvent(self._event(), self._device)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextlib.contextmanager
    def on_copy_stream(self, direction: Direction) -> Iterator[None]:
        stream = self._in if direction == "in" else self._out
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def wait_stream(self) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._in)
        current.wait_stream(self._out)

    def synchronize(self) -> None:
        self._in.synchronize()
        self._out.synchronize()

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        memory = aligned_empty(numel, dtype)
        if self._pin and numel:
            _pin(pages_of(memory), memory)
        return memory

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def _pin(pages: Pages, memory: torch.Tensor) -> None:
    """Locks the pages behind ``memory`` until they go. torch's own pinned memory comes in powers of two.

    Forked children do not get them: the system would copy what is locked, at once.

    Raises:
        OffloadError: the system refuses.
    """
    cudart: Any = torch.cuda.cudart()
    address, process = memory.untyped_storage().data_ptr(), os.getpid()
    code = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
    if code:
        raise OffloadError(
            f"{memory.nbytes:,} bytes of CPU memory cannot be page-locked (CUDA error {code}): free memory, offload "
            'less with "ratio", or write "pin_memory": false'
        )
    pages.madvise(mmap.MADV_DONTFORK)

    def unpin() -> None:
        with contextlib.suppress(Exception):  # the interpreter may be on its way out
            cudart.cudaHostUnregister(address)

    pages.before_unmap, pages.owner = unpin, process
