"""The transport for tensors on a GPU over a process group for CPUs: through host memory.

It is slow, because each operation waits for the GPU. It lets ranks share a GPU, which NCCL refuses, and gives the same
bits as the transport that moves the host memory.
"""

from __future__ import annotations

from functools import partial
from weakref import WeakSet

import torch

from zeroengine.comm.forwarding_transport import ForwardingTransport
from zeroengine.comm.interfaces import Buffer, Channel, Levels, Ranks, ResizableBuffer, Slices, Transport
from zeroengine.comm.sum_writers import SumWriters
from zeroengine.utils.work import Then, Work


class HostStagedChannel:
    """See ``interfaces.Channel``."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self._writers = SumWriters()
        # Gathers that write to other memory than the shard that they sent.
        self._sent_by_copy: WeakSet[Work] = WeakSet()

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, ranks: Ranks = None) -> Work:
        """Gather in host memory; the result goes to the device when it is awaited."""
        on_host = _host_empty(full, full.dtype)
        inner = self._inner.all_gather(on_host, _copy_to_host(shard), label, ranks)
        # If the shard is a slice of the full buffer, the copy of the result overwrites it.
        is_separate = shard.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()
        work = Then(inner, partial(full.copy_, on_host))
        if is_separate:
            self._sent_by_copy.add(work)
        return work

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool = False, levels: Levels = None
    ) -> Work:
        """Reduce in host memory; the sum goes to the device, or is added there, when it is awaited."""
        # A sum that is accumulated stays in fp32, so that only the total is rounded.
        summed = _host_empty(shard, torch.promote_types(shard.dtype, torch.float32) if accumulate else shard.dtype)
        inner = self._inner.reduce_scatter(summed, _copy_to_host(full), label, levels=levels)

        def copy_back() -> None:
            if accumulate:
                summed.add_(_copy_to_host(shard))
            shard.copy_(summed)

        return self._writers.write(shard, inner, copy_back, accumulate=accumulate)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, label: str, slices: Slices) -> Work:
        """Exchange in host memory; the result goes to the device when it is awaited."""
        on_host = _host_empty(received, received.dtype)
        work = Then(
            self._inner.all_to_all(on_host, _copy_to_host(sent), label, slices),
            partial(received.copy_, on_host),
        )
        self._sent_by_copy.add(work)
        return work

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        """Sum in host memory; the result goes to the device when it is awaited."""
        # The copy waits for the GPU, so host memory holds the values when the operation is issued.
        on_host = _copy_to_host(full)
        return Then(self._inner.all_reduce(on_host, label), partial(full.copy_, on_host))

    def reusable(self, work: Work, timeout_s: float) -> bool:
        """See ``interfaces.Channel``.

        The operation sends a copy in host memory. The original still counts as in use until the operation has finished,
        so that there are no more copies than gradient buffers.
        """
        assert isinstance(work, Then)
        if work.finished or work in self._sent_by_copy:
            return True
        if not timeout_s or not self._inner.reusable(work.work, timeout_s):
            return False
        work.wait_stream()
        return True


class HostStagedTransport(ForwardingTransport):
    """A transport whose tensors are on a GPU.

    Args:
        inner: The transport in host memory.
        device: The GPU.
    """

    def __init__(self, inner: Transport, device: torch.device) -> None:
        super().__init__(inner)
        self._device = device
        channels = (inner.gather, inner.reduce, inner.exchange)
        self.gather, self.reduce, self.exchange = map(HostStagedChannel, channels)

    def empty(self, numel: int, dtype: torch.dtype, *, sent: bool = True) -> torch.Tensor:
        """Return torch's own memory on the device."""
        return torch.empty(numel, dtype=dtype, device=self._device)

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool = False) -> Buffer:
        """Return a buffer of torch's own memory on the device."""
        return ResizableBuffer(self.empty(numel, dtype))

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """Sum in host memory. The host waits for the device."""
        return super().all_reduce_scalars(_copy_to_host(values), label).to(self._device)


def _host_empty(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(like.shape, dtype=dtype, device="cpu")


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return _host_empty(tensor, tensor.dtype).copy_(tensor)
