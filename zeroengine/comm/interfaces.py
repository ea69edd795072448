"""What the rest of the program sees of communication.

A ``Transport`` moves bytes between the ranks of one process group. It has two channels, ``gather`` and
``reduce``, each with its own order: all ranks issue the same operations on a channel in the same order,
and an operation may be issued on one channel while another is under way on the other.

[Note: Memory and streams]
On CUDA the caching allocator gives freed memory to whoever next allocates on the stream that it was allocated on, at
once: kernels and collectives that still use it must be ahead of that stream's next work. Here they are.
- A collective starts behind the stream that issued it, and keeps its tensors. Everybody who lets go of memory that one
  reads or writes has awaited it before, which puts the awaiting stream behind it.
- A full buffer may be gathered ahead of its use, on another stream than it is used on and released on. The first then
  waits for the last (``ResizableBuffer.free``), by an event, never by ``record_stream``.
- A bucket is written again once its reduce is through, or on a stream that has awaited it (``Channel.reusable``).
As everywhere in torch, who computes on several streams orders them: a forward behind the step before it, a second
stream that uses a unit behind the first.

Collectives sum in rank order wherever the transport decides the order (all but NCCL's), so equal inputs
give equal bits. Nothing here divides: see DESIGN "SUM only".
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Literal, Protocol

import torch

from zeroengine.utils.work import Work

ChannelName = Literal["gather", "reduce"]


class Buffer(Protocol):
    """A full buffer: memory that comes and goes at one address range, so that views of it stay valid."""

    tensor: torch.Tensor  # 1-D

    def prepare(self) -> None:
        """Before a gather into ``tensor``: there is memory for it."""

    def free(self) -> None:
        """The memory goes; ``tensor`` and its views must not be read until the next gather."""

    def detach(self) -> None:
        """Before this buffer is dropped while others share its memory: it no longer shows that of other ranks."""

    def nbytes(self) -> int:
        """Bytes that it holds now."""


def refill(tensor: torch.Tensor) -> None:
    """Gives memory of torch's own to a tensor whose storage was emptied."""
    tensor.untyped_storage().resize_(tensor.nbytes)


class ResizableBuffer:
    """A ``Buffer`` that empties its storage. Holds memory at first. See "Memory and streams" above.

    Args:
        fill: gives ``tensor`` memory again.
    """

    def __init__(self, tensor: torch.Tensor, fill: Callable[[torch.Tensor], None] = refill) -> None:
        self.tensor, self._fill = tensor, fill
        self._stream = self._current_stream()  # that the memory was allocated on

    def _current_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.tensor.device) if self.tensor.is_cuda else None

    def prepare(self) -> None:
        if self.tensor.untyped_storage().size() == 0:
            self._fill(self.tensor)
            self._stream = self._current_stream()

    def free(self) -> None:
        current = self._current_stream()
        if self._stream is not None and current is not None and self._stream != current:
            self._stream.wait_stream(current)
        self.tensor.untyped_storage().resize_(0)

    def detach(self) -> None: ...

    def nbytes(self) -> int:
        return self.tensor.untyped_storage().size()


class PagedBuffer:
    """A ``Buffer`` of CPU pages of its own, which a disk can read straight into. Holds memory at first."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        size = -(-max(numel, 1) * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype)[:numel]
        self._holds = True

    def prepare(self) -> None:
        self._holds = True

    def free(self) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED)
        self._holds = False

    def detach(self) -> None: ...

    def nbytes(self) -> int:
        return self.tensor.nbytes if self._holds else 0


class Channel(Protocol):
    """Operations in one order. ``label`` names the operation and its unit for people."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Work:
        """``full[r * n:(r + 1) * n]`` = rank r's ``shard``, 1-D of n elements.

        ``shard`` may be this rank's slice of ``full``. It must come from ``Transport.empty`` for this channel and
        stay as it is until ``Transport.all_reduce_scalars`` has next returned.
        """

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool = False) -> Work:
        """``shard`` = (or += with ``accumulate``) the sum over ranks of this rank's slice of their ``full``.

        ``full`` must come from ``Transport.empty`` for this channel, is 1-D of ``world_size * n`` elements, and may
        be written again once it is ``reusable``. ``shard`` may be this rank's slice of ``full``.
        """

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        """``full`` = the sum over ranks of ``full``, 1-D, divisible by ``world_size``, from ``Transport.empty``."""

    def reusable(self, work: Work, patience: float) -> bool:
        """Whether all ranks have read what ``work`` sent, after waiting for at most ``patience`` seconds."""


class Transport(Protocol):
    """One process group's way of moving bytes."""

    rank: int
    world_size: int
    name: str
    overlaps: bool  # whether issued operations proceed while this rank computes

    @property
    def gather(self) -> Channel: ...

    @property
    def reduce(self) -> Channel: ...

    def empty(self, numel: int, dtype: torch.dtype, channel: ChannelName, *, sent: bool = True) -> torch.Tensor:
        """Uninitialised memory, 1-D, that operations of ``channel`` may send from.

        Args:
            sent: False: they only receive into it.
        """

    def refill(self, tensor: torch.Tensor, channel: ChannelName | None) -> None:
        """Memory again for a tensor whose storage was emptied: such as ``empty`` gives, or torch's own for None."""

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool = False) -> Buffer:
        """A full buffer of ``numel`` elements that the gather channel gathers into.

        Args:
            copied: what is gathered stays when the shards that it came from are overwritten.
        """

    def shard_align(self, dtype: torch.dtype) -> int:
        """Elements that a shard should be a multiple of."""

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """The sum over ranks of a small float64 vector. Issue it with no other operation under way."""

    def check_order(self) -> None:
        """Waits for what the last ``all_reduce_scalars`` found out about the ranks' order, if it has not said so yet.

        Raises:
            DivergenceError: the ranks have run different operations.
        """

    def fence(self) -> None:
        """Returns when no rank reads this rank's memory any more. Every rank calls it at the same place."""

    def close(self) -> None: ...
