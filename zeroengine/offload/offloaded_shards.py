"""Parameter shards that are not on the device: read, ahead of use if possible, and all-gathered."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from zeroengine.comm.interfaces import Ranks, Slices, Transport
from zeroengine.comm.memory_reuse import buffer_to_reuse
from zeroengine.comm.quantized_transport import QuantizedGather
from zeroengine.disk.aligned_memory import ALIGNMENT
from zeroengine.monitor.timer import Timer
from zeroengine.offload.interfaces import OffloadStore, padded_nbytes
from zeroengine.offload.placement_plan import can_gather_ahead
from zeroengine.utils.work import Work


@dataclass(eq=False)
class _SendBuffer:
    """Memory that a shard is read into and sent from.

    Attributes:
        memory: Its bytes.
        gather: The last all-gather that was sent from it; None if nothing reads it any more.
        busy: Whether it holds, or is receiving, a shard that was not sent yet.
        address: The address of the shard that it holds, if `all_to_all` may send from it again.
    """

    memory: torch.Tensor
    gather: Work | None = None
    busy: bool = False
    address: int = 0


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
        # In the order in which they were last sent from.
        self._buffers: list[_SendBuffer] = []
        # By the shard's address.
        self._prefetched: dict[int, tuple[_SendBuffer, Work]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the buffers take."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

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
            buffer, values = self._read(shard, label)
            if quantized is not None:
                # The stream of the next read has packed these values, so the buffer is free for it.
                buffer.gather = None
                return quantized.all_gather(full, values, label, ranks)
            buffer.gather = self._transport.gather.all_gather(full, values, label, ranks)
        return buffer.gather

    def all_to_all(self, received: torch.Tensor, shard: torch.Tensor, part: slice, label: str, slices: Slices) -> Work:
        """Read a shard, and start to exchange a part of it. As ``Channel.all_to_all`` with ``shard[part]``."""
        # Several parameters of a unit are sent one after another. The last shard stays in its buffer for that.
        last = self._buffers[-1] if self._buffers else None
        if last is not None and last.address == shard.data_ptr() and not last.busy:
            buffer, values = last, last.memory[: shard.nbytes].view(shard.dtype)
        else:
            # The current stream orders this behind earlier uses of ``received``.
            buffer, values = self._read(shard, label)
        buffer.gather = self._transport.gather.all_to_all(received, values[part], label, slices)
        buffer.address = shard.data_ptr()
        return buffer.gather

    def _read(self, shard: torch.Tensor, label: str) -> tuple[_SendBuffer, torch.Tensor]:
        """Return the memory that a shard was read into, and its values there, for the current stream."""
        prefetched = self._prefetched.pop(shard.data_ptr(), None)
        buffer, read = prefetched if prefetched is not None else self._start_read(shard)
        with self._timer.span("offload", label):
            try:
                read.wait_stream()
            finally:
                # A failed read must free the buffer, too.
                buffer.busy = False
        return buffer, buffer.memory[: shard.nbytes].view(shard.dtype)

    def discard_prefetched(self, shard: torch.Tensor | None = None) -> None:
        """Drop prefetched values of one shard, or of all, because the shard is going to change.

        Waits for the reads, so that the shard may be written afterwards.
        """
        for buffer in self._buffers:
            buffer.address = 0
        if shard is None:
            # The reads are removed before they are awaited, so that a failed one raises only once.
            discarded, self._prefetched = self._prefetched, {}
        else:
            address = shard.data_ptr()
            discarded = {address: self._prefetched.pop(address)} if address in self._prefetched else {}
        # All buffers are freed even if a read raises.
        for buffer, _ in discarded.values():
            buffer.busy = False
        for _, read in discarded.values():
            with self._timer.span("offload"):
                read.wait_host()

    def _on_read_stream(self) -> AbstractContextManager[Any]:
        """Make the stream of the reads current. Do nothing if they use no stream."""
        return nullcontext() if self.store.copies is None else self.store.copies.on_copy_stream("in")

    def _start_read(self, shard: torch.Tensor) -> tuple[_SendBuffer, Work]:
        buffer = self._free_buffer(shard.nbytes)
        buffer.busy, buffer.address = True, 0
        return buffer, self.store.read(shard, buffer.memory[: shard.nbytes].view(shard.dtype))

    def _free_buffer(self, nbytes: int) -> _SendBuffer:
        """Return a buffer of at least ``nbytes`` bytes whose last shard all peers have received."""
        size = padded_nbytes(nbytes)
        fitting = [buffer for buffer in self._buffers if not buffer.busy and buffer.memory.nbytes >= size]
        # Buffers that do not fit count as well.
        num_others = len(self._buffers) - len(fitting)
        free = buffer_to_reuse(fitting, self._is_reusable, enough=max(1, self._num_buffers - num_others))
        if free is None:
            # Collectives send from the transport's memory, which is not aligned for direct I/O.
            memory = self._transport.empty(size + ALIGNMENT, torch.uint8)
            offset = -memory.data_ptr() % ALIGNMENT
            free = _SendBuffer(memory[offset : offset + size])
        else:
            self._buffers.remove(free)
        self._buffers.append(free)
        return free

    def _is_reusable(self, buffer: _SendBuffer, timeout_s: float) -> bool:
        """Return whether all peers have received a buffer's last shard, after waiting for at most ``timeout_s``."""
        if buffer.gather is None:
            return True
        if not timeout_s:
            return self._transport.gather.reusable(buffer.gather, 0.0)
        # A transport may order the current stream instead of waiting: that must be the stream of the next read.
        with self._on_read_stream():
            return self._transport.gather.reusable(buffer.gather, timeout_s)
