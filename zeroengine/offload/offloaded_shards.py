"""Parameter shards that are not on the device: read, ahead of use if possible, and all-gathered."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from zeroengine.comm.buffer_pool import BufferPool
from zeroengine.comm.interfaces import Ranks, Slices, Transport
from zeroengine.comm.quantized_transport import QuantizedGather
from zeroengine.disk.aligned_memory import ALIGNMENT
from zeroengine.monitor.timer import Timer
from zeroengine.offload.interfaces import OffloadStore, padded_nbytes
from zeroengine.offload.placement_plan import can_gather_ahead
from zeroengine.utils.work import Work


class OffloadedShards:
    """Parameter shards in a store, and the all-gathers that start there.

    Args:
        store: The store of the shards.
        transport: Gathers them.
        num_buffers: The number of shards in memory at once. There are more only if a peer is slow to receive them.
        timer: Times the waits for the store.

    Attributes:
        store: The store of the shards.
        medium: The kind of memory that the shards are in.
        can_gather_ahead: Whether a gather may be issued ahead of its use. Otherwise the host would first have to wait
            for the disk or for its peers, so only the read is issued ahead.
        is_read_directly: Whether a gather is no collective, but a read of the only rank.
    """

    def __init__(self, store: OffloadStore, transport: Transport, num_buffers: int, timer: Timer) -> None:
        self.store, self._transport, self.medium, self._timer = store, transport, store.medium, timer
        self._num_buffers = num_buffers
        self.is_read_directly = transport.world_size == 1
        self.can_gather_ahead = can_gather_ahead(store.medium, transport.world_size, overlaps=transport.overlaps)
        # Memory that shards are read into and sent from.
        self._buffers: BufferPool[Work] = BufferPool(
            self._aligned_memory, self._is_received, enough=num_buffers, counts_all=True, largest_multiple=math.inf
        )
        # By the shard's address: its values, and the read that brings them.
        self._prefetched: dict[int, tuple[torch.Tensor, Work]] = {}
        # The shard that ``all_to_all`` may send from again: its address, its values, and the last exchange of them.
        self._sent: tuple[int, torch.Tensor, Work] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the buffers take."""
        return self._buffers.nbytes

    def fill(self, shard: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the values of a shard, even of one that was read ahead."""
        # A shard that was read ahead has the old values.
        self.discard_prefetched(shard)
        self.store.fill(shard, values)

    def prefetch(self, shard: torch.Tensor) -> None:
        """Start to read a shard that will soon be gathered, unless all buffers but one are taken."""
        # One buffer stays free for the shard that is gathered next, so that prefetches never block it.
        if shard.data_ptr() not in self._prefetched and len(self._prefetched) < self._num_buffers - 1:
            self._prefetched[shard.data_ptr()] = self._start_read(shard)

    def all_gather(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        label: str,
        ranks: Ranks = None,
        quantized: QuantizedGather | None = None,
    ) -> Work:
        """Start to gather the ranks' shards into ``full``. As ``Channel.all_gather``.

        Args:
            full, shard, label, ranks: As for the channel.
            quantized: Gathers in place of the transport's own channel.
        """
        # With one rank the shard is the whole full buffer, and is read straight into it.
        if self.is_read_directly:
            return self.store.read(shard, full)
        # The collective is ordered behind the read on the copy stream, so that the computation waits for neither.
        with self._on_read_stream():
            values = self._read(shard, label)
            if quantized is not None:
                # The stream of the next read has packed these values, so the buffer is free for it.
                self._buffers.put_back(values)
                return quantized.all_gather(full, values, label, ranks)
            work = self._transport.gather.all_gather(full, values, label, ranks)
        self._buffers.put_back(values, work)
        return work

    def all_to_all(self, received: torch.Tensor, shard: torch.Tensor, part: slice, label: str, slices: Slices) -> Work:
        """Read a shard, and start to exchange a part of it. As ``Channel.all_to_all`` with ``shard[part]``."""
        # Several parameters of a unit are sent one after another. The last shard stays in its buffer for that.
        if self._sent is not None and self._sent[0] == shard.data_ptr():
            values = self._sent[1]
        else:
            # The current stream orders this behind earlier uses of ``received``.
            values = self._read(shard, label)
        work = self._transport.gather.all_to_all(received, values[part], label, slices)
        self._sent = shard.data_ptr(), values, work
        return work

    def _read(self, shard: torch.Tensor, label: str) -> torch.Tensor:
        """Return the values of a shard in a buffer, for the current stream."""
        self._put_sent_back()
        prefetched = self._prefetched.pop(shard.data_ptr(), None)
        values, read = prefetched if prefetched is not None else self._start_read(shard)
        with self._timer.span("offload", label):
            try:
                read.wait_stream()
            except BaseException:
                self._buffers.put_back(values)
                raise
        return values

    def discard_prefetched(self, shard: torch.Tensor | None = None) -> None:
        """Drop prefetched values of one shard, or of all, because the shard is going to change.

        Waits for the reads, so that the shard may be written afterwards.
        """
        self._put_sent_back()
        if shard is None:
            # The reads are removed before they are awaited, so that a failed one raises only once.
            discarded, self._prefetched = self._prefetched, {}
        else:
            address = shard.data_ptr()
            discarded = {address: self._prefetched.pop(address)} if address in self._prefetched else {}
        # All buffers are freed even if a read raises.
        for values, _ in discarded.values():
            self._buffers.put_back(values)
        for _, read in discarded.values():
            with self._timer.span("offload"):
                read.wait_host()

    def _on_read_stream(self) -> AbstractContextManager[Any]:
        """Make the stream of the reads current. Do nothing if they use no stream."""
        return nullcontext() if self.store.copies is None else self.store.copies.on_copy_stream("in")

    def _start_read(self, shard: torch.Tensor) -> tuple[torch.Tensor, Work]:
        self._put_sent_back()
        # A read moves whole blocks.
        memory = self._buffers.take(padded_nbytes(shard.nbytes))
        values = memory[: shard.nbytes].view(shard.dtype)
        return values, self.store.read(shard, values)

    def _put_sent_back(self) -> None:
        if self._sent is not None:
            self._buffers.put_back(*self._sent[1:])
            self._sent = None

    def _aligned_memory(self, nbytes: int) -> torch.Tensor:
        # Collectives send from the transport's memory, which is not aligned for direct I/O.
        memory = self._transport.empty(nbytes + ALIGNMENT, torch.uint8)
        offset = -memory.data_ptr() % ALIGNMENT
        return memory[offset : offset + nbytes]

    def _is_received(self, gather: Work, timeout_s: float) -> bool:
        """Return whether all peers have received a buffer's last shard, after waiting for at most ``timeout_s``."""
        # A transport may order the current stream instead of waiting: that must be the stream of the next read.
        with self._on_read_stream() if timeout_s else nullcontext():
            return self._transport.gather.reusable(gather, timeout_s)
