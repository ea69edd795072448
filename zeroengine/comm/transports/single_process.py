"""The transport of one rank: nothing to move, only copies where the memory differs."""

from __future__ import annotations

import torch

from zeroengine.comm.interfaces import Buffer, ChannelName, PagedBuffer, ResizableBuffer, refill
from zeroengine.utils.work import Completed, Work


class SingleProcessChannel:
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Work:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return Completed()

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool = False) -> Work:
        if accumulate:
            shard.add_(full)
        elif full.data_ptr() != shard.data_ptr():
            shard.copy_(full)
        return Completed()

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        return Completed()

    def reusable(self, work: Work, patience: float) -> bool:
        return True


class SingleProcessTransport:
    """See ``interfaces.Transport``."""

    name = "local"
    rank = 0
    world_size = 1
    overlaps = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.gather = self.reduce = SingleProcessChannel()

    def empty(self, numel: int, dtype: torch.dtype, channel: ChannelName, *, sent: bool = True) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def refill(self, tensor: torch.Tensor, channel: ChannelName | None) -> None:
        refill(tensor)

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool = False) -> Buffer:
        if self._device.type == "cpu":
            return PagedBuffer(numel, dtype)
        return ResizableBuffer(self.empty(numel, dtype, "gather"))

    def shard_align(self, dtype: torch.dtype) -> int:
        return 1

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        return values

    def check_order(self) -> None: ...

    def fence(self) -> None: ...

    def close(self) -> None: ...
