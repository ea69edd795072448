"""The mean over replicas of values that each replica has changed by itself (``local_steps``).

[Note: Pieces]
The ranks of a replica that hold copies of the same values divide them. Each rank averages its piece with its
counterparts in the other replicas, and then the ranks with copies gather the pieces. So each element leaves a replica
once, whatever the degrees: a rank sends 2 (n - 1) / n of its piece to n - 1 counterparts.

[Note: Chunks]
Pieces are packed into chunks of at most ``CHUNK_NUMEL`` elements, so that many small units take few messages and large
ones little memory. The sum of a chunk is issued before the previous chunk is unpacked. All ranks run the same chunks in
the same order, so none waits for a rank that waits for it.

[Note: Equal bits]
Every counterpart gets the same bits of a sum, and computes the same from them. So replicas are equal afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from zeroengine.comm.buffer_pool import REUSE_TIMEOUT_S
from zeroengine.comm.interfaces import Transport
from zeroengine.disk.mapped_memory import populate
from zeroengine.monitor.timer import Timer
from zeroengine.offload.interfaces import OffloadStore, poison_on_error
from zeroengine.utils.formats import round_up
from zeroengine.utils.work import Work

# Elements of a chunk at most.
CHUNK_NUMEL = 1 << 22
# A chunk is summed while the one before it is unpacked.
NUM_BUFFERS = 2


@dataclass(frozen=True, eq=False)
class Region:
    """Values that each replica has its own version of.

    Attributes:
        values: 1-D, floating-point or complex: on the device, in CPU memory, or a mapped part of a file.
        owners: The ranks of the replica that hold the same values, in the order of their pieces, which are equally
            long. One rank: it averages all of them.
        position: This rank's place among ``owners``.
        store: Where the values live; None: on the device.
    """

    values: torch.Tensor
    owners: tuple[int, ...]
    position: int
    store: OffloadStore | None = None

    @property
    def piece_numel(self) -> int:
        """Elements of a piece."""
        return self.values.numel() // len(self.owners)

    def part(self, position: int, start: int, stop: int) -> torch.Tensor:
        """Return a view of elements ``start`` to ``stop`` of a piece, complex numbers as pairs of real ones."""
        first = position * self.piece_numel
        return as_real(self.values[first + start : first + stop])


@dataclass
class Chunk:
    """Parts of pieces that are summed together.

    Attributes:
        dtype: The dtype of the sum.
        owners: Those of the regions.
        parts: Regions, and the range [start, stop) of a piece of each.
        numel: Numbers in the chunk.
    """

    dtype: torch.dtype
    owners: tuple[int, ...]
    parts: list[tuple[Region, int, int]] = field(default_factory=list)
    numel: int = 0


# Is called with a region, a range of this rank's piece, and the mean of these values, and turns that into new values.
Update = Callable[[Region, int, int, torch.Tensor], None]


class ReplicaMean:
    """Averages values over the replicas, in place.

    Args:
        transport: Moves bytes between the ranks of the replica.
        between: Moves bytes between the counterparts.
        timer: Times the exchange.
        numel: Elements of all pieces that are averaged usually.
        device: The device that sums are on.
        has_copies: Whether ranks of the replica hold copies of the same values.

    Attributes:
        nbytes: Bytes of the buffers.
    """

    def __init__(
        self, transport: Transport, between: Transport, timer: Timer, numel: int, device: torch.device, has_copies: bool
    ) -> None:
        self._transport, self._between, self._timer, self._device = transport, between, timer, device
        self._num_replicas = between.world_size
        # The elements of fp32 that fit into a buffer.
        self._capacity = chunk_capacity(numel, self._num_replicas)
        nbytes = self._capacity * torch.float32.itemsize
        self._buffers = [between.empty(nbytes, torch.uint8) for _ in range(NUM_BUFFERS)]
        # The last sum of each buffer.
        self._works: list[Work | None] = [None] * NUM_BUFFERS
        # What the ranks with copies gather from. Without copies there is nothing to gather.
        self._sent = transport.empty(nbytes, torch.uint8) if has_copies else self._buffers[0][:0]
        self.nbytes = (NUM_BUFFERS + has_copies) * nbytes

    def run(self, regions: Sequence[Region], label: str, update: Update | None = None) -> None:
        """Replace the values of each region by their mean over the replicas, or by what ``update`` makes of it.

        A collective of all replicas. No rank may read the values meanwhile.

        Args:
            regions: The values, the same ones in the same order on every rank.
            label: Names the exchange; ranks that differ in it are refused.
            update: See ``Update``. None: the mean is the new value.

        Raises:
            DivergenceError: A replica runs another exchange, or does not come.
        """
        stores = {id(region.store): region.store for region in regions if region.store is not None}
        with self._timer.span("reduce", label=label), poison_on_error(*stores.values()):
            # Replicas that differ in what they exchange are found here, before anything changes.
            self._between.all_reduce_scalars(torch.ones(1, dtype=torch.float64, device=self._device), label)
            self._between.check_order()
            under_way: tuple[Chunk, torch.Tensor, Work] | None = None
            for number, chunk in enumerate(self._chunks(regions)):
                issued = self._sum(chunk, number, f"{label}, chunk {number}")
                if under_way is not None:
                    self._unpack(*under_way, label, update)
                under_way = issued
            if under_way is not None:
                self._unpack(*under_way, label, update)

    def _chunks(self, regions: Sequence[Region]) -> Iterator[Chunk]:
        """Pack regions of one dtype and with the same owners into chunks, in order."""
        kinds = dict.fromkeys((sum_dtype(region.values.dtype), region.owners) for region in regions)
        for dtype, owners in kinds:
            capacity = self._capacity * torch.float32.itemsize // dtype.itemsize
            # What the last chunk is padded to must fit as well.
            capacity -= capacity % self._num_replicas
            chunk = Chunk(dtype, owners)
            for region in regions:
                if (sum_dtype(region.values.dtype), region.owners) != (dtype, owners):
                    continue
                width, start = 2 if region.values.is_complex() else 1, 0
                while start < region.piece_numel:
                    if chunk.numel + width > capacity:
                        yield chunk
                        chunk = Chunk(dtype, owners)
                    stop = min(region.piece_numel, start + (capacity - chunk.numel) // width)
                    chunk.parts.append((region, start, stop))
                    chunk.numel += (stop - start) * width
                    start = stop
            if chunk.parts:
                yield chunk

    def _sum(self, chunk: Chunk, number: int, label: str) -> tuple[Chunk, torch.Tensor, Work]:
        """Start to sum a chunk over the counterparts."""
        index = number % NUM_BUFFERS
        work = self._works[index]
        if work is not None and not self._between.reduce.reusable(work, REUSE_TIMEOUT_S):
            # A peer that stalls is an error of this call.
            self._between.fence()
        buffer = self._buffers[index].view(chunk.dtype)[: round_up(chunk.numel, self._num_replicas)]
        offset = 0
        for region, start, stop in chunk.parts:
            part = region.part(region.position, start, stop)
            # Values in a file are read in now, so that a failing disk raises an error.
            populate(part)
            buffer[offset : offset + part.numel()].copy_(part)
            offset += part.numel()
            _evict(region, part)
        buffer[offset:].zero_()
        self._works[index] = work = self._between.reduce.all_reduce(buffer, label)
        slices = 2 * (self._num_replicas - 1) / self._num_replicas
        self._timer.count("reduce", int(slices * buffer.nbytes))
        return chunk, buffer, work

    def _unpack(self, chunk: Chunk, buffer: torch.Tensor, work: Work, label: str, update: Update | None) -> None:
        """Take over the sum of a chunk."""
        work.wait_stream()
        # Counterparts may still read sums from the buffer, so it is left as it is.
        means = buffer[: chunk.numel] / self._num_replicas
        if update is not None:
            offset = 0
            for region, start, stop in chunk.parts:
                numel = region.part(region.position, start, stop).numel()
                update(region, start, stop, means[offset : offset + numel])
                offset += numel
        if len(chunk.owners) == 1:
            self._write(chunk, 0, means)
            return
        sent = self._sent.view(chunk.dtype)[: chunk.numel].copy_(means)
        gathered = torch.empty(len(chunk.owners) * chunk.numel, dtype=chunk.dtype, device=self._device)
        self._transport.reduce.all_gather(gathered, sent, label, chunk.owners).wait_stream()
        for position, values in enumerate(gathered.chunk(len(chunk.owners))):
            self._write(chunk, position, values)
        # The next chunk is sent from the same memory.
        self._transport.fence()

    def _write(self, chunk: Chunk, position: int, values: torch.Tensor) -> None:
        """Write ``values`` over the parts of the chunk in the pieces of one owner."""
        offset = 0
        for region, start, stop in chunk.parts:
            part = region.part(position, start, stop)
            populate(part, write=True)
            part.copy_(values[offset : offset + part.numel()])
            offset += part.numel()
            _evict(region, part)


def chunk_capacity(numel: int, num_replicas: int) -> int:
    """Return the elements of fp32 in a buffer of ``ReplicaMean``.

    Args:
        numel: Elements of all pieces.
        num_replicas: The number of replicas.
    """
    # Twice the padding leaves room for at least one complex fp64 number of a small model.
    return round_up(min(CHUNK_NUMEL, max(numel, 8)), 2 * num_replicas)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed: at least fp32; that of the parts of complex numbers."""
    return torch.promote_types(dtype.to_real(), torch.float32)


def as_real(values: torch.Tensor) -> torch.Tensor:
    """Return a 1-D view in which complex numbers are pairs of real ones."""
    return torch.view_as_real(values).view(-1) if values.is_complex() else values


def _evict(region: Region, part: torch.Tensor) -> None:
    if region.store is not None:
        region.store.evict(part)
