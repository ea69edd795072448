"""Channels that send integers of 8 or 4 bits in place of floats: qwZ and qgZ of ZeRO++ (arXiv 2306.10209, section 4).

They stand around the channels of a transport, and send packets (``ops.quantize``) through them. What is sent is
rounded, so that a gather or a sum is off by up to half a step of each block. Tensors of other dtypes than fp32, bf16
and fp16 go through the transport as they are.

[Note: Ranks agree]
Every rank computes with the values that the packets hold, also the rank that packed them. The shards that packets are
made from stay exact.

[Note: Hops]
A sum takes one exchange where the transport reads peers directly, and one for each level where it ``reduces_by_levels``
(see ``Degrees``). Each hop packs what it sends, adds what has arrived in fp32 in rank order, and the next hop packs the
sums. An all-reduce is an exchange of slices and a gather of their packed sums.

All ranks must issue the hops in one order. On a GPU a stream of the channel's own issues all hops at once. On the CPU a
later hop is issued by the first wait, or before the next operation, whichever comes first. The host then waits for
peers, which may wait for a gather of this rank. So there all-reduces are exact if any unit is gathered.

[Note: Sums of hosts]
The transport of several hosts adds the gradients of each host exactly, and packs only the sums that it sends to other
hosts (``Transport.packed_sums``). It issues its steps by itself, so that all-reduces are always packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from zeroengine import ops
from zeroengine.comm.buffer_pool import send_memory
from zeroengine.comm.interfaces import Levels, Ranks, Slices, Transport
from zeroengine.comm.packing import ErrorFeedback, Packing, is_quantizable
from zeroengine.comm.sum_writers import SumWriters
from zeroengine.partition.degrees import ranks_of_level
from zeroengine.utils.work import Then, Work, current_stream, order_behind_current, synchronize_stream

GATHER_BITS = 8
# Issues one hop for each item: its work, and whether it is the last.
Hops = Iterator[tuple[Work, bool]]


def rounded(shard: torch.Tensor) -> torch.Tensor:
    """Return what quantized gathers show of ``shard``, 1-D."""
    packet = torch.empty(ops.packet_bytes(shard.numel(), GATHER_BITS), dtype=torch.uint8, device=shard.device)
    ops.quantize(shard, packet, bits=GATHER_BITS)
    values = torch.empty_like(shard)
    ops.dequantize_sum(values, packet, bits=GATHER_BITS, num_slices=1)
    return values


class QuantizedGather:
    """Gathers of parameters for use, as integers of 8 bits. Takes the place of ``Channel.all_gather``."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self._memory = transport, send_memory(transport, transport.gather)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it keeps."""
        return self._memory.nbytes

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, ranks: Ranks = None) -> Work:
        """Gather what the packets of the ranks' shards hold. ``shard`` is not a part of ``full``, and does not change.

        As ``Channel.all_gather``. ``shard`` may have any memory, and may be written on the current stream at once.
        """
        count = full.numel() // shard.numel()
        packet = self._memory.take(ops.packet_bytes(shard.numel(), GATHER_BITS))
        ops.quantize(shard, packet, bits=GATHER_BITS)
        arrived = torch.empty(count * packet.numel(), dtype=torch.uint8, device=shard.device)
        work = self._transport.gather.all_gather(arrived, packet, label, ranks)
        self._memory.put_back(packet, work)
        stream = current_stream()
        packets = (packet, arrived)

        def finish() -> None:
            ops.dequantize_sum(full, packets[1], bits=GATHER_BITS, num_slices=count)
            # The packets were allocated on this stream, which may reuse their memory once they were sent and read.
            order_behind_current(stream)

        return Then(work, finish)


class QuantizedSum:
    """A sum of several hops. See ``utils.work.Work``.

    Args:
        hops: Issues one hop for each item, after the one before it was awaited, and uses the result of the last when it
            is resumed once more. An item is the hop's work, and whether it is the last.
        before: A work that must finish before the last result is used.
        in_place: Whether the result is written to the memory that was packed.
        stream: The stream that issues the hops. None: the CPU's.
    """

    def __init__(self, hops: Hops, before: Work | None, in_place: bool, stream: torch.cuda.Stream | None) -> None:
        self._hops: Hops | None = hops
        self._before, self._in_place, self._stream = before, in_place, stream
        with _on_stream(stream):
            self._work, self._is_last = next(hops)
            self._packed = None if stream is None else stream.record_event()
        if stream is not None:
            self.issue_all()

    def issue_all(self) -> None:
        """Issue every hop. On the CPU wait for all but the last."""
        with _on_stream(self._stream):
            while not self._is_last:
                self._work.wait_stream()
                assert self._hops is not None
                self._work, self._is_last = next(self._hops)

    def wait_stream(self) -> None:
        """Order the current stream behind the last hop, and write the sum there."""
        if self._hops is None:
            return
        self.issue_all()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._work.wait_stream()
        if self._before is not None:
            self._before.wait_stream()
        next(self._hops, None)
        # The packets' memory was allocated on the channel's stream, which may reuse it once this stream has read it.
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._hops = self._before = None

    def wait_host(self) -> None:
        """Wait for the sum, and for the kernels that write it."""
        self.wait_stream()
        synchronize_stream()

    def done(self) -> bool:
        """Return whether the last hop is done. The sum may still have to be written."""
        return self._hops is None or (self._is_last and self._work.done())

    def reusable(self, timeout_s: float) -> bool:
        """Return whether the memory that was packed may be written. See ``Channel.reusable``."""
        if self._in_place:
            if timeout_s:
                self.wait_stream()
            return self._hops is None
        # On the CPU it was packed when the operation was issued.
        if self._packed is None:
            return True
        if timeout_s:
            torch.cuda.current_stream().wait_event(self._packed)
            return True
        return bool(self._packed.query())


class QuantizedReduce:
    """Sums of gradients as integers of ``bits`` bits. See ``interfaces.Channel``.

    Args:
        transport: Moves the packets.
        bits: 8 or 4.
        feedback: How the errors are kept. None: they are lost.
        device: The device of the gradients.
        all_reduces: Whether all-reduces that take hops are quantized. See "Hops" above.
    """

    def __init__(
        self,
        transport: Transport,
        bits: int,
        feedback: ErrorFeedback | None,
        device: torch.device,
        all_reduces: bool = True,
    ) -> None:
        self._quantizes_all_reduce = all_reduces
        self._transport, self._channel = transport, transport.reduce
        # These are exact.
        self.all_gather, self.all_to_all = transport.reduce.all_gather, transport.reduce.all_to_all
        self.packing = Packing(bits, feedback)
        self._rank, self._world_size = transport.rank, transport.world_size
        self._memory = send_memory(transport, transport.reduce)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: QuantizedSum | None = None
        self._writers = SumWriters()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it keeps."""
        return self._memory.nbytes + self.packing.nbytes

    # -- operations -------------------------------------------------------------------------------

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool = False, levels: Levels = None
    ) -> Work:
        """Exchange packets of slices, and add them when the result is awaited."""
        if not (is_quantizable(full.dtype) and is_quantizable(shard.dtype)):
            return self._channel.reduce_scatter(shard, full, label, accumulate, levels)
        if (packed_sums := self._transport.packed_sums) is not None:
            return packed_sums.reduce_scatter(shard, full, label, accumulate, levels, self.packing)
        before = self._writers.before(shard, accumulate=accumulate)
        work = self._issue(self._reduce_hops(shard, full, label, accumulate, levels), before)
        self._writers.record(shard, work)
        return work

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        """Exchange packets of slices, add them, and gather packets of the sums."""
        if not is_quantizable(full.dtype):
            return self._channel.all_reduce(full, label)
        if (packed_sums := self._transport.packed_sums) is not None:
            return packed_sums.reduce_scatter(full, full, label, levels=(), packing=self.packing)
        if not self._quantizes_all_reduce:
            return self._channel.all_reduce(full, label)
        everyone = tuple(range(self._world_size))
        hops = self._all_reduce_hops(full, full, label, False, everyone, is_own=True)
        return self._issue(hops, None, in_place=True)

    def reusable(self, work: Work, timeout_s: float) -> bool:
        """See ``interfaces.Channel``. The memory of a reduce-scatter is free once it was packed."""
        if isinstance(work, QuantizedSum):
            return work.reusable(timeout_s)
        return self._channel.reusable(work, timeout_s)

    def _issue(self, hops: Hops, before: Work | None, in_place: bool = False) -> QuantizedSum:
        # The later hops of the operation before this one come first, on every rank.
        if self._last is not None:
            self._last.issue_all()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._last = QuantizedSum(hops, before, in_place, self._stream)
        return self._last

    # -- hops -------------------------------------------------------------------------------------

    def _reduce_hops(
        self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool, levels: Levels
    ) -> Hops:
        rank, world_size = self._rank, self._world_size
        levels = (world_size,) if levels is None else levels
        if not self._transport.reduces_by_levels:
            arrived, work = self._exchange(full, full.numel() // shard.numel(), label, None, levels, is_own=True)
            yield work, True
            self.packing.add(shard, arrived, num_sources=world_size, accumulate=accumulate)
            return
        summed, below = full, 1
        for level in levels:
            ranks, is_last = ranks_of_level(rank, below, level), level == world_size
            arrived, work = self._exchange(summed, level // below, label, ranks, None, is_own=below == 1)
            yield work, is_last
            if is_last:
                self.packing.add(shard, arrived, num_sources=len(ranks), accumulate=accumulate)
                return
            summed = torch.empty(summed.numel() * below // level, dtype=torch.float32, device=full.device)
            self.packing.add(summed, arrived, num_sources=len(ranks))
            below = level
        # The ranks that have the same slice sum it.
        copies = ranks_of_level(rank, below, world_size)
        yield from self._all_reduce_hops(summed, shard, label, accumulate, copies, is_own=False)

    def _all_reduce_hops(
        self,
        values: torch.Tensor,
        target: torch.Tensor,
        label: str,
        accumulate: bool,
        ranks: tuple[int, ...],
        is_own: bool,
    ) -> Hops:
        arrived, work = self._exchange(values, len(ranks), label, ranks, None, is_own)
        yield work, False
        part = torch.empty(values.numel() // len(ranks), dtype=torch.float32, device=values.device)
        self.packing.add(part, arrived, num_sources=len(ranks))
        packet = self._memory.take(self.packing.packet_bytes(part.numel()))
        self.packing.pack(part, packet)
        gathered = torch.empty(len(ranks) * packet.numel(), dtype=torch.uint8, device=values.device)
        gather = self._channel.all_gather(gathered, packet, label, ranks)
        self._memory.put_back(packet, gather)
        yield gather, True
        self.packing.add(target, gathered, num_slices=len(ranks), accumulate=accumulate)

    def _exchange(
        self, values: torch.Tensor, num_slices: int, label: str, ranks: Ranks, levels: Levels, is_own: bool
    ) -> tuple[torch.Tensor, Work]:
        """Pack slices and issue their exchange.

        Args:
            values: What to pack. ``is_own``: this rank's own gradients of a unit, whose error is kept.
            num_slices: The number of slices.
            label, ranks, levels: As for ``Channel.all_to_all`` and ``Slices``.

        Returns:
            Where the packets arrive, and the exchange.
        """
        size = self.packing.packet_bytes(values.numel() // num_slices)
        packets = self._memory.take(num_slices * size)
        self.packing.pack(values, packets, num_slices=num_slices, error_of=label if is_own else None)
        count = self._world_size if ranks is None else len(ranks)
        arrived = torch.empty(count * size, dtype=torch.uint8, device=values.device)
        work = self._channel.all_to_all(arrived, packets, label, Slices(ranks, levels))
        self._memory.put_back(packets, work)
        return arrived, work


def _on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
