"""The transport between CPU ranks of one host: each rank's memory is a file that its peers read.

Gloo would send the bytes through sockets, four kernel copies a byte on cores that are busy with compute.
Here a rank *posts* an operation (a counter in a shared page, and what the operation is) and each peer
reads what it needs straight into its destination, or maps it.

[Note: Lifetimes]
Memory that was posted may be written again once every peer has executed the operation (``executed`` of
each peer is past it). ``all_reduce_scalars`` is posted on the reduce channel after the gather channel is
drained, and a rank posts it only after executing everything before it, so it closes all lifetimes at once.
"""

from __future__ import annotations

import mmap

import torch

from zeroengine.comm.interfaces import Buffer, ChannelName, PagedBuffer, refill
from zeroengine.comm.transports.shared_memory_channel import SharedMemoryChannel
from zeroengine.comm.transports.shared_memory_file import CHANNELS, SharedMemory


class SharedMemoryTransport:
    """See ``interfaces.Transport``. ``timeout``: seconds after which a stalled operation is an error."""

    name = "shm"
    overlaps = False
    # Whole pages can be mapped.
    shard_align_bytes = mmap.PAGESIZE
    refill = staticmethod(refill)

    def __init__(self, memory: SharedMemory, timeout: float) -> None:
        self.rank, self.world_size = memory.rank, memory.world_size
        self._memory = memory
        # The channels refer to this list, which is complete only after both are made: a rank that waits on one moves
        # both on.
        channels: list[SharedMemoryChannel] = []
        channels += [SharedMemoryChannel(memory, name, timeout, channels) for name in CHANNELS]
        self.gather, self.reduce = channels
        self._scalars: list[torch.Tensor] = []

    def empty(self, numel: int, dtype: torch.dtype, channel: ChannelName, *, sent: bool = True) -> torch.Tensor:
        """Return memory of this rank's file, or torch's own for what is not sent."""
        return self._memory.empty(numel, dtype) if sent else torch.empty(numel, dtype=dtype, device="cpu")

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool = False) -> Buffer:
        """Return a buffer that shards are mapped into, or one that they are copied into."""
        # A mapped shard shows what its owner writes next. Offloaded shards are sent from buffers that soon hold another
        # shard, so their values must be copied.
        return PagedBuffer(numel, dtype) if copied else self._memory.mapped_buffer(numel, dtype)

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """See ``interfaces.Transport``, and "Lifetimes" above."""
        # Two vectors in turn: a rank is at most one such operation ahead of the slowest reader.
        if not self._scalars or self._scalars[0].numel() < values.numel():
            self._scalars = [self.empty(values.numel(), torch.float64, "reduce") for _ in range(2)]
        self._scalars.reverse()
        sent = self._scalars[0][: values.numel()].copy_(values)
        self.gather.drain()
        self.reduce.drain()
        return self.reduce.all_reduce_scalars(sent, label)

    def check_order(self) -> None:
        """Return at once: operations are compared as they are executed."""

    def fence(self) -> None:
        """Return when every peer has executed all that this rank has posted."""
        # This rank first does its own part on both channels. Otherwise two ranks could wait for each other.
        for channel in (self.gather, self.reduce):
            channel.drain()
        for channel in (self.gather, self.reduce):
            channel.fence()

    def close(self) -> None:
        """Close the memory files."""
        self._memory.close()
