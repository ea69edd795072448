"""Summed gradients on their way from the device to the store that keeps them.

[Note: The path of an offloaded sum]
A reduce puts the sum into a staging buffer on the device. It is rounded once: where the collective's dtype differs from
the one that is kept, or where the sum of an earlier micro-step must be read back and added, a second staging buffer
holds the result. Its squared norm is computed before it leaves, so that the norm of the step reads nothing back. Then
it is written to the store.

Where the store's copies are ordered by a CUDA stream, everything is issued at once on that stream, beside the backward.
Two staging buffers suffice, for the stream orders their uses. Elsewhere the host must see that a reduce is done before
it writes the sum, which it does when it next looks for a free buffer, or at ``wait_all``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from zeroengine import ops
from zeroengine.disk.aligned_memory import aligned_zeros
from zeroengine.offload.interfaces import Copies, padded_nbytes, poison_on_error
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.utils.work import Then, Work

# Buffers of one size that are allocated rather than waiting for a write. Reduces in progress may need more.
MAX_IDLE_STAGING_BUFFERS = 3


@dataclass(eq=False)
class StagingBuffer:
    """Device memory that a sum is reduced into and written to its store from."""

    memory: torch.Tensor  # 1-D, uint8
    holds_sum: bool = True  # a sum that is not being written yet
    write: Work | None = None  # in progress, of the gradients below
    grads: UnitGradients | None = None

    def wait_write(self) -> None:
        """Return when what was in the buffer is in its store."""
        # The attribute is cleared first, so that a write that failed raises once and not at every later wait.
        write, self.write = self.write, None
        if write is not None:
            assert self.grads is not None
            _wait_transfer(write, self.grads)


def _shard_view(memory: torch.Tensor, grads: UnitGradients, dtype: torch.dtype) -> torch.Tensor:
    """Return as many elements of ``dtype`` as this rank keeps of ``grads`` (1-D)."""
    return memory[: grads.flat_grads.numel() * dtype.itemsize].view(dtype)


def _sum_dtype(grads: UnitGradients) -> torch.dtype:
    """Return the dtype to reduce into, wide enough that the sum is rounded once: when it becomes what is kept."""
    return torch.promote_types(grads.reduce_dtype, grads.dtype)


def _wait_transfer(transfer: Work, grads: UnitGradients) -> None:
    """Wait for a read or a write. If it fails a gradient is lost, so the store refuses every later step."""
    assert grads.store is not None
    with poison_on_error(grads.store):
        transfer.wait_host()


class OffloadedGradients:
    """Reduces gradients into staging buffers and writes the sums to their stores. Buffers are never given back."""

    def __init__(self) -> None:
        self._staging_buffers: list[StagingBuffer] = []
        # For each reduce in progress a work that, when awaited, starts the write of the sum.
        self._reducing: list[tuple[UnitGradients, Work]] = []
        # 1-D, uint8. The store's stream orders their uses.
        self._ordered_buffers: list[torch.Tensor] = []
        self._ordered_writes: dict[UnitGradients, Work] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all staging buffers."""
        return sum(b.memory.nbytes for b in self._staging_buffers) + sum(b.nbytes for b in self._ordered_buffers)

    def reduce_and_store(self, grads: UnitGradients, reduce: Callable[[torch.Tensor], Work], accumulate: bool) -> Work:
        """Reduce gradients, and write their sum to their store when it is there.

        Args:
            reduce: Launches a reduce into the tensor it is given (1-D).
            accumulate: Whether the sum is added to what the store holds.

        Returns:
            A work that is done when the gradients that were reduced are needed no more.
        """
        assert grads.store is not None
        if (copies := grads.store.copies) is not None:
            return self._reduce_and_store_ordered(grads, copies, reduce, accumulate)
        # The reduce is launched before the host waits for anything, so that it proceeds meanwhile.
        sum_buffer = self._acquire(grads)
        work = reduce(_shard_view(sum_buffer.memory, grads, _sum_dtype(grads)))
        if accumulate:
            self._wait_stored(grads)
        total_buffer = self._acquire(grads) if accumulate or _sum_dtype(grads) is not grads.dtype else None
        read = None
        if accumulate:
            assert total_buffer is not None
            # The earlier sum is read back while the reduce is in progress.
            read = grads.store.read(grads.flat_grads, _shard_view(total_buffer.memory, grads, grads.dtype))
        # The write starts when somebody awaits this: ``_acquire`` once the reduce is done, ``_wait_stored`` or
        # ``wait_all``.
        self._reducing.append((grads, Then(work, partial(self._write, grads, sum_buffer, total_buffer, read))))
        return work

    def _finish_reduces(self, selects: Callable[[UnitGradients, Work], bool]) -> None:
        """Wait for the reduces in progress that ``selects`` is true of, and start the writes of their sums."""
        for pair in [pair for pair in self._reducing if selects(*pair)]:
            # Removed first, so that one that failed raises once and not at every later wait.
            self._reducing.remove(pair)
            pair[1].wait_stream()

    def _wait_stored(self, grads: UnitGradients) -> None:
        """Return when the sums of earlier micro-steps are in the store, from where they are read back."""
        self._finish_reduces(lambda reduced, _: reduced is grads)
        for buffer in self._staging_buffers:
            if buffer.grads is grads:
                buffer.wait_write()

    def _write(
        self, grads: UnitGradients, sum_buffer: StagingBuffer, total_buffer: StagingBuffer | None, read: Work | None
    ) -> None:
        """Start to write a sum that has been reduced.

        Args:
            total_buffer: The buffer that the sum is cast into or added to. None: the sum is written as it is.
            read: The read of the earlier sum into ``total_buffer``, to which this one is added.
        """
        buffer = sum_buffer
        if total_buffer is not None:
            latest = _shard_view(sum_buffer.memory, grads, _sum_dtype(grads))
            total = _shard_view(total_buffer.memory, grads, grads.dtype)
            if read is None:
                total.copy_(latest)
            else:
                _wait_transfer(read, grads)
                total.add_(latest)
            # The total holds the sum from here on, so the first buffer is free for another reduce.
            sum_buffer.holds_sum, buffer = False, total_buffer
        total = _shard_view(buffer.memory, grads, grads.dtype)
        # Now the sum is in device memory. The norm of the step would otherwise have to read it back from the store.
        grads.squared_norm = ops.squared_norm(total)
        assert grads.store is not None
        buffer.grads, buffer.holds_sum = grads, False
        buffer.write = grads.store.write(total, grads.flat_grads)

    def _reduce_and_store_ordered(
        self, grads: UnitGradients, copies: Copies, reduce: Callable[[torch.Tensor], Work], accumulate: bool
    ) -> Work:
        store = grads.store
        assert store is not None
        with copies.on_copy_stream("out"), poison_on_error(store):
            total = latest = self._ordered_buffer(0, copies, grads, _sum_dtype(grads))
            reduce(latest).wait_stream()
            # The gradient buffer is free from here on. All that follows uses the staging buffers alone.
            reduced = copies.record_event()
            if accumulate or latest.dtype is not grads.dtype:
                total = self._ordered_buffer(1, copies, grads, grads.dtype)
            if accumulate:
                store.read(grads.flat_grads, total).wait_stream()
                total.add_(latest)
            elif total is not latest:
                total.copy_(latest)
            grads.squared_norm = ops.squared_norm(total)
            self._ordered_writes[grads] = store.write(total, grads.flat_grads)
        return reduced

    def _ordered_buffer(self, index: int, copies: Copies, grads: UnitGradients, dtype: torch.dtype) -> torch.Tensor:
        """Return one of the two buffers whose uses the store's stream orders, large enough for ``grads``."""
        need = padded_nbytes(grads.flat_grads.numel() * dtype.itemsize)
        while len(self._ordered_buffers) <= index:
            self._ordered_buffers.append(copies.device_memory(need))
        if self._ordered_buffers[index].nbytes < need:
            # The caller has made the copy stream current. The allocator gives the smaller buffer, which came from that
            # stream, to nobody before the transfers that use it.
            self._ordered_buffers[index] = copies.device_memory(need)
        return _shard_view(self._ordered_buffers[index], grads, dtype)

    def _acquire(self, grads: UnitGradients) -> StagingBuffer:
        """Return a staging buffer for ``grads``, preferably one whose write is done."""
        self._finish_reduces(lambda _, work: work.done())
        need = padded_nbytes(grads.flat_grads.numel() * _sum_dtype(grads).itemsize)
        # A buffer of more than four times the size is left to larger units.
        fitting = [buffer for buffer in self._staging_buffers if need <= buffer.memory.nbytes <= 4 * need]
        idle = [buffer for buffer in fitting if not buffer.holds_sum]
        # Buffers whose write is done come first, since they need no wait.
        idle.sort(key=lambda buffer: buffer.write is not None and not buffer.write.done())
        # Up to the limit another buffer is allocated rather than waiting for a write.
        if not idle or (idle[0].write is not None and len(fitting) < MAX_IDLE_STAGING_BUFFERS):
            self._staging_buffers.append(StagingBuffer(aligned_zeros(need, torch.uint8)))
            return self._staging_buffers[-1]
        idle[0].wait_write()
        idle[0].holds_sum = True
        return idle[0]

    def wait_all(self) -> None:
        """Return when every sum is in its store."""
        # The reduces come first, since each of them starts a write, which is awaited after.
        self._finish_reduces(lambda *_: True)
        for buffer in self._staging_buffers:
            buffer.wait_write()
        while self._ordered_writes:
            grads, write = self._ordered_writes.popitem()
            _wait_transfer(write, grads)
