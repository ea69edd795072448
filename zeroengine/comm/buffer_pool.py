"""Memory that is used again once its last use is over, and the choice between it and new memory.

Other questions decide about these buffers, which are in no pool:
- Those of a ring follow one another (``offload.pipeline``, ``optim.backends.owner_exchange``, ``optim.replica_mean``).
- Buckets of weights are dropped by their consumer, and never given back (``weights.stream``).
- Staging buffers are reused once the host has awaited their writes, and those that hold sums count as well, so that
  their number does not depend on the speed of a disk (``runtime.offloaded_gradients``).
- Inputs of checkpoints share a budget with those of other engines (``sequence.host_activations``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from zeroengine.comm.interfaces import Channel, Transport
from zeroengine.utils.work import Work

# The seconds to wait until peers have read a buffer (``Channel.reusable``), before another buffer is made.
REUSE_TIMEOUT_S = 1.0
# So many buffers of one size suffice: one is filled while the other is sent. Waiting for fewer would stop the overlap.
ENOUGH_BUFFERS = 2
Use = TypeVar("Use")


@dataclass(eq=False)
class _IdleBuffer(Generic[Use]):
    """A buffer that was put back.

    Attributes:
        memory: The whole of it.
        last_use: What may still read or write it. None: nothing does.
    """

    memory: torch.Tensor
    last_use: Use | None


class BufferPool(Generic[Use]):
    """Buffers that are taken again, by whoever needs as much. They are freed by ``clear`` alone. Not thread-safe.

    Args:
        allocate: Returns new memory of at least so many bytes: 1-D, uint8, with a storage of its own.
        is_over: Returns whether the last use of a buffer is over, after waiting for it for at most so many seconds.
            If it raises, it is not asked about this use again.
        enough: The number of fitting buffers from which on the oldest is awaited before there is another one. None:
            another one is made whenever none is free.
        counts_all: Whether buffers that do not fit or are in use count as well.
        largest_multiple: A buffer fits those who need its size divided by this, or more.
        keeps: Whether memory is kept. Otherwise it is new each time.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        is_over: Callable[[Use, float], bool] = lambda *_: True,
        *,
        enough: int | None = None,
        counts_all: bool = False,
        largest_multiple: float = 1.0,
        keeps: bool = True,
    ) -> None:
        self._allocate, self._is_over, self._enough, self._counts_all = allocate, is_over, enough, counts_all
        self._largest_multiple, self._keeps = largest_multiple, keeps
        # Every buffer, by the address of its storage.
        self._buffers: dict[int, torch.Tensor] = {}
        # In the order in which they were put back. Uses end roughly in that order.
        self._idle: list[_IdleBuffer[Use]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers that are kept, in use or not."""
        return sum(memory.nbytes for memory in self._buffers.values())

    def take(
        self,
        numel: int,
        dtype: torch.dtype = torch.uint8,
        *,
        largest: int | None = None,
        enough: int | None = None,
    ) -> torch.Tensor:
        """Return memory, 1-D, whose last use is over. Its values are undefined.

        Args:
            numel: The elements.
            dtype: Their dtype.
            largest: Buffers of up to so many elements fit as well, and one of that size is made before smaller ones.
            enough: Instead of the pool's.
        """
        nbytes = numel * dtype.itemsize
        largest_nbytes = None if largest is None else largest * dtype.itemsize
        buffer = self._reusable(nbytes, largest_nbytes, self._enough if enough is None else enough)
        if buffer is not None:
            memory = buffer.memory
            self._idle.remove(buffer)
        else:
            has_largest = any(memory.nbytes == largest_nbytes for memory in self._buffers.values())
            memory = self._allocate(nbytes if largest_nbytes is None or has_largest else largest_nbytes)
            if self._keeps:
                self._buffers[memory.untyped_storage().data_ptr()] = memory
        return memory[:nbytes].view(dtype)

    def put_back(self, tensor: torch.Tensor, last_use: Use | None = None) -> None:
        """Take back what ``take`` has returned.

        Args:
            tensor: The memory, or a view of it.
            last_use: What may still read or write the memory. None: nothing does.
        """
        if self._keeps:
            self._idle.append(_IdleBuffer(self._buffers[tensor.untyped_storage().data_ptr()], last_use))

    def clear(self) -> list[torch.Tensor]:
        """Forget the buffers that are not in use, and return their memory. All last uses are over."""
        memory = [buffer.memory for buffer in self._idle]
        self._idle.clear()
        for tensor in memory:
            del self._buffers[tensor.untyped_storage().data_ptr()]
        return memory

    def _reusable(self, nbytes: int, largest_nbytes: int | None, enough: int | None) -> _IdleBuffer[Use] | None:
        """Return the buffer to use next for ``nbytes`` bytes; None if a new one is to be made.

        The smallest one that is free is preferred. If there is none, but there are enough, the oldest is awaited.
        """
        # Any multiple of no bytes would be none.
        largest = self._largest_multiple * max(nbytes, 1) if largest_nbytes is None else largest_nbytes
        fitting = [buffer for buffer in self._idle if nbytes <= buffer.memory.nbytes <= largest]
        for buffer in sorted(fitting, key=lambda buffer: buffer.memory.nbytes):
            if buffer.last_use is None or self._is_free(buffer, 0.0):
                return buffer
        # A peer may read this memory only after its own backward, which may need this rank's next gather. Waiting
        # without a limit could therefore deadlock.
        count = len(self._buffers if self._counts_all else fitting)
        waits = fitting and enough is not None and count >= enough
        return fitting[0] if waits and self._is_free(fitting[0], REUSE_TIMEOUT_S) else None

    def _is_free(self, buffer: _IdleBuffer[Use], timeout_s: float) -> bool:
        # The use is forgotten before it is awaited, so that a failed one raises only once.
        last_use, buffer.last_use = buffer.last_use, None
        if last_use is None or self._is_over(last_use, timeout_s):
            return True
        buffer.last_use = last_use
        return False


def private_memory() -> BufferPool[Work]:
    """Return a pool of CPU memory that is free at once when it is put back."""
    return BufferPool(partial(torch.empty, dtype=torch.uint8, device="cpu"))


def send_memory(transport: Transport, channel: Channel) -> BufferPool[Work]:
    """Return a pool of memory that ``channel`` sends from. It is temporary unless the transport ``keeps_memory``."""
    allocate = partial(transport.empty, dtype=torch.uint8)
    return BufferPool(allocate, channel.reusable, enough=ENOUGH_BUFFERS, keeps=transport.keeps_memory)
