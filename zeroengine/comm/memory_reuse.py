"""The choice between memory that was sent before and new memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from zeroengine.comm.interfaces import Channel, Transport
from zeroengine.utils.work import Work

# The seconds to wait until peers have read a buffer (``Channel.reusable``), before another buffer is made.
REUSE_TIMEOUT_S = 1.0
# So many buffers of one size suffice: one is filled while the other is sent. Waiting for fewer would stop the overlap.
ENOUGH_BUFFERS = 2
B = TypeVar("B")


def buffer_to_reuse(
    buffers: Sequence[B], is_reusable: Callable[[B, float], bool], enough: int = ENOUGH_BUFFERS
) -> B | None:
    """Return the buffer to write next, or None if a new one is to be allocated.

    A buffer that all peers have read is preferred. If there is none, but there are enough buffers, the oldest is waited
    for, up to ``REUSE_TIMEOUT_S``.

    Args:
        buffers: The buffers of the size that is needed, in the order in which they were sent. Operations end roughly in
            that order.
        is_reusable: Returns whether a buffer may be written, after waiting for it for at most so many seconds.
        enough: The number of buffers from which on the oldest is awaited.
    """
    buffer = next((candidate for candidate in buffers if is_reusable(candidate, 0.0)), None)
    # A peer may read this memory only after its own backward, which may need this rank's next gather. Waiting without a
    # limit could therefore deadlock.
    if buffer is None and len(buffers) >= enough and is_reusable(buffers[0], REUSE_TIMEOUT_S):
        buffer = buffers[0]
    return buffer


class SendMemory:
    """Memory that a channel sends from.

    Where the transport ``keeps_memory`` it is used again. Elsewhere it is temporary.
    """

    def __init__(self, transport: Transport, channel: Channel) -> None:
        self._transport, self._channel = transport, channel
        self._reuses = transport.keeps_memory
        # The memory with the last operation that sent it.
        self._sent: list[tuple[torch.Tensor, Work]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is kept."""
        return sum(memory.nbytes for memory, _ in self._sent)

    def acquire(self, nbytes: int) -> torch.Tensor:
        """Return uint8 memory, 1-D, that no peer reads any more."""
        fitting = [entry for entry in self._sent if entry[0].numel() == nbytes]
        free = buffer_to_reuse(fitting, lambda entry, timeout_s: self._channel.reusable(entry[1], timeout_s))
        if free is None:
            return self._transport.empty(nbytes, torch.uint8)
        self._sent = [entry for entry in self._sent if entry is not free]
        return free[0]

    def mark_sent(self, memory: torch.Tensor, work: Work) -> None:
        """Record the operation that sends ``memory``."""
        if self._reuses:
            self._sent.append((memory, work))
