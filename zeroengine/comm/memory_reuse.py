"""The choice between memory that was sent before and new memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

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
