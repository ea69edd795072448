"""Summed gradients on their way from the device to the store that keeps them.

[Note: The path of an offloaded sum]
A reduce writes the sum into a staging buffer on the device. The sum is rounded once: if the collective's dtype differs
from the dtype that is kept, or if the sum of an earlier micro-step must be read back and added, a second staging buffer
holds the result. Its squared norm is computed while it is on the device, so that the norm of the step reads nothing
back. Then it is written to the store.

If a CUDA stream orders the store's copies, everything is issued at once on that stream, in parallel with the backward.
Two staging buffers suffice, because the stream orders their uses. Otherwise the host must see that a reduce is done
before it writes the sum. It checks when it next looks for a free buffer, and at ``wait_all``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from zeroengine import ops
from zeroengine.disk.aligned_memory import aligned_zeros
from zeroengine.monitor.timer import Timer
from zeroengine.offload.device_copies import GPUCopies
from zeroengine.offload.interfaces import poison_on_error
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.utils.work import Then, Work

# Up to this many buffers of one size are allocated instead of waiting for a write. Reduces in progress may need more.
MAX_IDLE_STAGING_BUFFERS = 3
# Launches a reduce into a 1-D tensor.
LaunchReduce = Callable[[torch.Tensor], Work]


@dataclass(eq=False)
class StagingBuffer:
    """Device memory that a sum is reduced into and written to its store from."""

    memory: torch.Tensor  # 1-D, uint8
    holds_sum: bool = True  # holds a sum whose write has not started
    write: Work | None = None  # in progress, of the sum of ``unit_grads``
    unit_grads: UnitGradients | None = None

    def take_write(self) -> Work | None:
        """Return the write in progress, if any, and forget it, so that a failed one raises only once."""
        write, self.write = self.write, None
        return write


def _shard_view(memory: torch.Tensor, unit_grads: UnitGradients, dtype: torch.dtype) -> torch.Tensor:
    """View ``memory`` as the 1-D shard that this rank keeps of ``unit_grads``, in ``dtype``."""
    return memory[: unit_grads.flat_grads.numel() * dtype.itemsize].view(dtype)


def staging_buffer_to_reuse(buffers: Iterable[StagingBuffer], need: int) -> StagingBuffer | None:
    """Return the buffer for the next ``need`` bytes, preferably one whose write is done. None: a new one is needed."""
    # Buffers of more than four times the size are left to larger units.
    fitting = [buffer for buffer in buffers if need <= buffer.memory.nbytes <= 4 * need]
    # Buffers whose write is done come first.
    idle = sorted(
        (buffer for buffer in fitting if not buffer.holds_sum),
        key=lambda buffer: buffer.write is not None and not buffer.write.done(),
    )
    if not idle or (idle[0].write is not None and len(fitting) < MAX_IDLE_STAGING_BUFFERS):
        return None
    return idle[0]


class OffloadedGradients:
    """Reduces gradients into staging buffers and writes the sums to their stores. Buffers are never freed.

    Args:
        timer: Times the waits for reduces and for stores.
    """

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._staging_buffers: list[StagingBuffer] = []
        # For each reduce in progress: a work that starts the write of the sum when it is awaited.
        self._reducing: list[tuple[UnitGradients, Work]] = []
        # 1-D, uint8. The store's stream orders their uses.
        self._ordered_buffers: list[torch.Tensor] = []
        self._ordered_writes: dict[UnitGradients, Work] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all staging buffers."""
        return sum(b.memory.nbytes for b in self._staging_buffers) + sum(b.nbytes for b in self._ordered_buffers)

    def reduce_and_store(self, unit_grads: UnitGradients, reduce: LaunchReduce, accumulate: bool) -> Work:
        """Reduce gradients, and write their sum to their store when the reduce is done.

        Args:
            reduce: Launches a reduce into its argument, a 1-D tensor.
            accumulate: Whether the sum is added to what the store holds.

        Returns:
            A work that is done when the gradient buffer is no longer needed.
        """
        assert unit_grads.store is not None
        if (copies := unit_grads.store.copies) is not None:
            return self._reduce_and_store_ordered(unit_grads, copies, reduce, accumulate)
        numel = unit_grads.flat_grads.numel()
        sum_bytes, total_bytes = unit_grads.format.staging_bytes(numel, accumulates=accumulate, on_stream=False)
        # The reduce is launched before the host waits for anything, so that it proceeds meanwhile.
        sum_buffer = self._acquire(sum_bytes)
        work = reduce(_shard_view(sum_buffer.memory, unit_grads, unit_grads.format.sum_dtype))
        if accumulate:
            self._wait_stored(unit_grads)
        total_buffer = self._acquire(total_bytes) if total_bytes else None
        read = None
        if accumulate:
            assert total_buffer is not None
            # The earlier sum is read back while the reduce is in progress.
            earlier_sum = _shard_view(total_buffer.memory, unit_grads, unit_grads.format.dtype)
            read = unit_grads.store.read(unit_grads.flat_grads, earlier_sum)
        # The write starts when this work is awaited, by ``_acquire`` (if the reduce is done), ``_wait_stored`` or
        # ``wait_all``.
        write = partial(self._write, unit_grads, sum_buffer, total_buffer, read)
        self._reducing.append((unit_grads, Then(work, write)))
        return work

    def _finish_reduces(self, selects: Callable[[UnitGradients, Work], bool]) -> None:
        """Wait for the reduces in progress for which ``selects`` returns true, and start the writes of their sums."""
        for pair in [pair for pair in self._reducing if selects(*pair)]:
            # The pair is removed first, so that a failed reduce raises only once and not at every later wait.
            self._reducing.remove(pair)
            with self._timer.span("reduce", pair[0].unit.name):
                pair[1].wait_stream()

    def _wait_stored(self, unit_grads: UnitGradients) -> None:
        """Return when the sums of earlier micro-steps are in the store, so that they can be read back."""
        self._finish_reduces(lambda reduced, _: reduced is unit_grads)
        for buffer in self._staging_buffers:
            if buffer.unit_grads is unit_grads:
                self._wait_write(buffer)

    def _write(
        self,
        unit_grads: UnitGradients,
        sum_buffer: StagingBuffer,
        total_buffer: StagingBuffer | None,
        read: Work | None,
    ) -> None:
        """Start the write of a sum whose reduce is done.

        Args:
            total_buffer: The buffer that the sum is cast into or added to. None: the sum is written unchanged.
            read: The read of the earlier sum into ``total_buffer``, to which this sum is added.
        """
        buffer = sum_buffer
        if total_buffer is not None:
            latest = _shard_view(sum_buffer.memory, unit_grads, unit_grads.format.sum_dtype)
            total = _shard_view(total_buffer.memory, unit_grads, unit_grads.format.dtype)
            if read is None:
                total.copy_(latest)
            else:
                self._wait_transfer(read, unit_grads)
                total.add_(latest)
            # The total holds the sum from here on, so the first buffer is free for another reduce.
            sum_buffer.holds_sum, buffer = False, total_buffer
        total = _shard_view(buffer.memory, unit_grads, unit_grads.format.dtype)
        # The sum is in device memory now. Later, the norm of the step would have to read it back from the store.
        unit_grads.squared_norm = ops.squared_norm(unit_grads.unreplicated_part(total))
        assert unit_grads.store is not None
        buffer.unit_grads, buffer.holds_sum = unit_grads, False
        buffer.write = unit_grads.store.write(total, unit_grads.flat_grads)

    def _reduce_and_store_ordered(
        self, unit_grads: UnitGradients, copies: GPUCopies, reduce: LaunchReduce, accumulate: bool
    ) -> Work:
        store, numel = unit_grads.store, unit_grads.flat_grads.numel()
        assert store is not None
        sum_bytes, total_bytes = unit_grads.format.staging_bytes(numel, accumulates=accumulate, on_stream=True)
        # No span may begin in here: its marks would be on the copy stream.
        with copies.on_copy_stream("out"), poison_on_error(store):
            sum_memory = self._ordered_buffer(0, copies, sum_bytes)
            total = latest = _shard_view(sum_memory, unit_grads, unit_grads.format.sum_dtype)
            reduce(latest).wait_stream()
            # The gradient buffer is free from here on, because the rest uses only the staging buffers.
            reduced = copies.record_event()
            if total_bytes:
                total = _shard_view(self._ordered_buffer(1, copies, total_bytes), unit_grads, unit_grads.format.dtype)
            if accumulate:
                store.read(unit_grads.flat_grads, total).wait_stream()
                total.add_(latest)
            elif total is not latest:
                total.copy_(latest)
            unit_grads.squared_norm = ops.squared_norm(unit_grads.unreplicated_part(total))
            self._ordered_writes[unit_grads] = store.write(total, unit_grads.flat_grads)
        return reduced

    def _ordered_buffer(self, index: int, copies: GPUCopies, need: int) -> torch.Tensor:
        """Return one of the two buffers whose uses the store's stream orders, of at least ``need`` bytes."""
        while len(self._ordered_buffers) <= index:
            self._ordered_buffers.append(copies.device_memory(need))
        if self._ordered_buffers[index].nbytes < need:
            # The smaller buffer was allocated on the copy stream, which is current now. So the allocator reuses its
            # memory only after the transfers that use it.
            self._ordered_buffers[index] = copies.device_memory(need)
        return self._ordered_buffers[index]

    def _acquire(self, need: int) -> StagingBuffer:
        """Return a staging buffer of at least ``need`` bytes."""
        self._finish_reduces(lambda _, work: work.done())
        buffer = staging_buffer_to_reuse(self._staging_buffers, need)
        if buffer is None:
            buffer = StagingBuffer(aligned_zeros(need, torch.uint8))
            self._staging_buffers.append(buffer)
        self._wait_write(buffer)
        buffer.holds_sum = True
        return buffer

    def wait_all(self) -> None:
        """Return when every sum is in its store."""
        # The reduces come first, because finishing each of them starts a write, which is awaited below.
        self._finish_reduces(lambda *_: True)
        for buffer in self._staging_buffers:
            self._wait_write(buffer)
        while self._ordered_writes:
            unit_grads, write = self._ordered_writes.popitem()
            self._wait_transfer(write, unit_grads)

    def _wait_write(self, buffer: StagingBuffer) -> None:
        """Return when the sum in ``buffer`` is in its store."""
        write = buffer.take_write()
        if write is not None:
            assert buffer.unit_grads is not None
            self._wait_transfer(write, buffer.unit_grads)

    def _wait_transfer(self, transfer: Work, unit_grads: UnitGradients) -> None:
        """Wait for a read or a write. If it fails, a gradient is lost, so the store refuses every later step."""
        assert unit_grads.store is not None
        with self._timer.span("offload", unit_grads.unit.name), poison_on_error(unit_grads.store):
            transfer.wait_host()
