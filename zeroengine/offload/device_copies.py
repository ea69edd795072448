"""Copies between a GPU and page-locked host memory, on streams of their own that overlap the computation."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import Literal

import torch

from zeroengine.disk.aligned_memory import Pages, aligned_zeros, pages_of
from zeroengine.errors import OffloadError
from zeroengine.utils.host_memory import page_lock
from zeroengine.utils.work import Work

# Into device memory, or out of it.
Direction = Literal["in", "out"]


class RecordedEvent:
    """A ``Work`` that is done when the device reaches an event.

    It keeps its tensors alive until the host has waited, because a copy under way must not lose its memory.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device, *tensors: torch.Tensor) -> None:
        self._event, self._device, self._tensors = event, device, tensors

    def wait_host(self) -> None:
        """Block the host until the device has reached the event."""
        self._event.synchronize()
        # The copy is done, so its tensors may be freed.
        self._tensors = ()

    def wait_stream(self) -> None:
        """Order the current stream behind the event."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def done(self) -> bool:
        """Return whether the device has reached the event."""
        return bool(self._event.query())


class GPUCopies:
    """Copies between a GPU and the host: one stream for each direction, because a GPU copies both ways at once.

    Args:
        device: The GPU.
        pin: Whether host memory is page-locked. Otherwise copies are slower and the host waits for them.
    """

    def __init__(self, device: torch.device, pin: bool = True) -> None:
        self._device, self._pin = device, pin
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Work | None = None) -> Work:
        """Start ``target.copy_(source)`` on the stream of its direction. One of the two is on the host.

        Neither may be written, and ``target`` not be read, before the returned work was awaited.

        Args:
            target: The tensor that the values are copied into.
            source: The values, of the same shape and dtype.
            after: The work that the copy is ordered behind. None: everything in the current stream, which inside
                ``on_copy_stream`` is a copy stream.
        """
        # A GPU has a copy engine for each direction, so a copy in never waits behind a copy out.
        stream, current = self._in if target.is_cuda else self._out, torch.cuda.current_stream(self._device)
        # Inside ``on_copy_stream`` copies of both directions stay on that stream, in order. Otherwise reading back a
        # gradient to accumulate into it would make all later shards on the "in" stream wait for the sum.
        if after is None and current in (self._in, self._out):
            stream = current
        with torch.cuda.stream(stream):
            if after is not None:
                after.wait_stream()
            elif stream != current:
                stream.wait_stream(current)
            # The host goes on only if its memory is page-locked. Otherwise torch waits here.
            target.copy_(source, non_blocking=True)
            return self.record_event(target, source)

    def record_event(self, *tensors: torch.Tensor) -> Work:
        """Return a work that is done when everything in the current stream so far is. It keeps ``tensors`` alive."""
        # A thread that waits for a blocking event sleeps instead of spinning on a core.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return RecordedEvent(event, self._device, *tensors)

    @contextlib.contextmanager
    def on_copy_stream(self, direction: Direction) -> Iterator[None]:
        """Make a copy stream current, ordered behind the previous current stream."""
        stream = self._in if direction == "in" else self._out
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def wait_stream(self) -> None:
        """Order the current stream behind both copy streams."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._in)
        current.wait_stream(self._out)

    def synchronize(self) -> None:
        """Block the host until both copy streams are idle."""
        self._in.synchronize()
        self._out.synchronize()

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the host."""
        return not tensor.is_cuda

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new 1-D host memory of zeros, of exactly this size, page-locked unless ``pin`` is False."""
        memory = aligned_zeros(numel, dtype)
        if self._pin and numel:
            _pin(pages_of(memory), memory)
        return memory

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` new bytes of torch's allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def _pin(pages: Pages, memory: torch.Tensor) -> None:
    """Page-lock ``memory`` until its pages are unmapped.

    torch rounds its own pinned memory up to powers of two, which could nearly double the memory of large states. For
    forked children see the note above ``Pages``.

    Raises:
        OffloadError: The system refuses.
    """
    code, unlock = page_lock(memory)
    if code:
        raise OffloadError(
            f"{memory.nbytes:,} bytes of CPU memory cannot be page-locked (CUDA error {code}): free memory, offload "
            'less with "ratio", or write "pin_memory": false'
        )
    # A fork would copy all page-locked memory at once.
    pages.madvise(mmap.MADV_DONTFORK)
    # The pages stay locked until their last tensor is gone and they are unmapped.
    pages.before_unmap, pages.owner = unlock, os.getpid()
