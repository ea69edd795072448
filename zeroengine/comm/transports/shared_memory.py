"""The transport between CPU ranks of one host: each rank's memory is a file that its peers read.

Gloo would send the bytes through sockets, with four kernel copies of each byte on cores that are busy with compute.
Here a rank *posts* an operation (a record of it and a counter, in shared pages), and each peer reads the bytes that it
needs straight into their destination, or maps them.

[Note: Lifetimes]
Memory that was posted may be written again once every peer has executed the operation (the ``executed`` counter of each
peer is past it). A rank posts ``all_reduce_scalars`` only after it has executed everything before it on both channels,
so when that returns all memory posted earlier may be written again.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from zeroengine.comm.interfaces import Buffer, PagedBuffer
from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.comm.transports.shared_memory_channel import SharedMemoryChannel
from zeroengine.comm.transports.shared_memory_file import CHANNELS, SharedMemory


class SharedMemoryTransport(TransportTraits):
    """See ``interfaces.Transport``.

    Args:
        memory: The memory files of all ranks.
        timeout: Seconds after which a stalled operation is an error.
        progress_others: See ``SharedMemoryChannel``.
        report: See ``SharedMemoryChannel``.
    """

    name = "shm"
    packed_sums = None
    keeps_memory = True
    shares_pages = True
    # Whole pages can be mapped.
    shard_align_bytes = mmap.PAGESIZE

    def __init__(
        self,
        memory: SharedMemory,
        timeout: float,
        progress_others: Callable[[], None] | None = None,
        report: Callable[[], str] | None = None,
    ) -> None:
        self.rank, self.world_size = memory.rank, memory.world_size
        self.ranks_per_host = memory.world_size
        self._memory = memory
        # All channels refer to this list, because a rank that waits on one executes operations of all. The list is
        # complete once all exist. The last two serve ``TwoLevelTransport`` alone.
        self._channels: list[SharedMemoryChannel] = []
        names = CHANNELS if progress_others is not None else CHANNELS[:3]
        self._channels += [
            SharedMemoryChannel(memory, name, timeout, self._channels, progress_others, report) for name in names
        ]
        self.gather, self.reduce, self.exchange, *self.of_other_hosts = self._channels
        self._scalars: list[torch.Tensor] = []

    def empty(self, numel: int, dtype: torch.dtype, *, sent: bool = True) -> torch.Tensor:
        """Return memory of this rank's file if operations send from it, else torch's own."""
        return self._memory.empty(numel, dtype) if sent else torch.empty(numel, dtype=dtype, device="cpu")

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool = False) -> Buffer:
        """Return a buffer that shards are mapped into, or one that they are copied into."""
        # A mapped shard shows its owner's later writes. Offloaded shards are sent from buffers that soon hold another
        # shard, so their values must be copied.
        return PagedBuffer(numel, dtype) if copied else self._memory.mapped_buffer(numel, dtype)

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """See ``interfaces.Transport``, and "Lifetimes" above."""
        # Two vectors alternate, because a rank is at most one such operation ahead of the slowest reader.
        if not self._scalars or self._scalars[0].numel() < values.numel():
            self._scalars = [self.empty(values.numel(), torch.float64) for _ in range(2)]
        self._scalars.reverse()
        sent = self._scalars[0][: values.numel()].copy_(values)
        for channel in self._channels:
            channel.drain()
        return self.reduce.all_reduce_scalars(sent, label)

    def fence(self) -> None:
        """Return when every peer has executed everything that this rank posted."""
        # This rank first executes its own operations. Otherwise two ranks could wait for each other.
        for channel in self._channels:
            channel.drain()
        for channel in self._channels:
            channel.fence()

    def reclaim(self) -> None:
        """Free the pages of this rank's file that no tensor is in any more."""
        self._memory.reclaim()

    def close(self) -> None:
        """Close the memory files."""
        self._memory.close()
