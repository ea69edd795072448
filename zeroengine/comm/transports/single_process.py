"""The transport of one rank: nothing to move, only copies if source and target differ."""

from __future__ import annotations

import torch

from zeroengine.comm.interfaces import Buffer, Levels, PagedBuffer, Ranks, ResizableBuffer, Slices
from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.utils.work import Completed, Work


class SingleProcessChannel:
    """See ``interfaces.Channel``. Every operation is complete when it returns."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, ranks: Ranks = None) -> Work:
        """Copy the shard, unless it is the full buffer."""
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return Completed()

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool = False, levels: Levels = None
    ) -> Work:
        """Copy or add the only slice."""
        # The only slice is the whole sum. Both operations cast it to the shard's dtype.
        if accumulate:
            shard.add_(full)
        elif full.data_ptr() != shard.data_ptr():
            shard.copy_(full)
        return Completed()

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, label: str, slices: Slices) -> Work:
        """Copy the only slice."""
        received.copy_(sent)
        return Completed()

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        """Return at once: there is one value."""
        return Completed()

    def reusable(self, work: Work, timeout_s: float) -> bool:
        """Return True."""
        return True


class SingleProcessTransport(TransportTraits):
    """See ``interfaces.Transport``."""

    name = "single"
    packed_sums = None
    has_peers = False
    rank = 0
    world_size = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.gather = self.reduce = self.exchange = SingleProcessChannel()

    def empty(self, numel: int, dtype: torch.dtype, *, sent: bool = True) -> torch.Tensor:
        """Return torch's own memory."""
        return torch.empty(numel, dtype=dtype, device=self._device)

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool = False) -> Buffer:
        """Return a buffer of pages, which a disk can read into, or of device memory."""
        if self._device.type == "cpu":
            return PagedBuffer(numel, dtype)
        return ResizableBuffer(self.empty(numel, dtype))

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """Return the values."""
        return values

    def close(self) -> None:
        """Return at once."""
