"""Summed gradients on their way from the device to where they are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from zeroengine import ops
from zeroengine.offload.disk_store import OffloadStore, padded_nbytes, poison_on_error
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.utils.work import Then, Work

NUM_LANDINGS = 3  # of one size; more only while reduces stay under way


@dataclass(eq=False)
class _Landing:
    """Memory that a sum lands in and is written from."""

    memory: torch.Tensor  # bytes
    busy: bool = True  # with a sum that has not arrived
    write: Work | None = None
    grads: UnitGradients | None = None  # that are on their way from it

    def of(self, grads: UnitGradients, dtype: torch.dtype) -> torch.Tensor:
        return _part(self.memory, grads, dtype)

    def settle(self) -> None:
        """Returns when what was in it is where it is kept."""
        write, self.write = self.write, None
        if write is not None:
            assert self.grads is not None
            _await(write, self.grads)


def _part(memory: torch.Tensor, grads: UnitGradients, dtype: torch.dtype) -> torch.Tensor:
    return memory[: grads.grad_shard.numel() * dtype.itemsize].view(dtype)


def _sum_dtype(grads: UnitGradients) -> torch.dtype:
    """What a sum lands in, so that it is rounded but once, when it is added to what is kept."""
    return torch.promote_types(grads.reduce_dtype, grads.dtype)


def _await(transfer: Work, grads: UnitGradients) -> None:
    """Where it fails a gradient is lost, and no step may be taken with what is left."""
    assert grads.store is not None
    with poison_on_error(grads.store):
        transfer.wait_host()


class Landings:
    """The memory that sums land in before they are written. It is kept.

    Where streams order transfers everything is issued at once, beside the backward. Elsewhere a sum is written when
    somebody sees that it has arrived.
    """

    def __init__(self) -> None:
        self._landings: list[_Landing] = []
        self._arriving: list[tuple[UnitGradients, Work]] = []  # done when the sum is on its way to the store
        self._in_line: list[torch.Tensor] = []  # for a sum, and for what it is added to
        self._written: dict[UnitGradients, Work] = {}  # in the order of streams

    @property
    def nbytes(self) -> int:
        memory = [landing.memory for landing in self._landings] + self._in_line
        return sum(tensor.nbytes for tensor in memory)

    def send(self, grads: UnitGradients, reduce: Callable[[torch.Tensor], Work], accumulate: bool) -> Work:
        """Reduces gradients, and sees to it that their sum gets to its store; added to what is there already.

        Args:
            reduce: starts a reduce into the tensor it is given.

        Returns:
            Done when the gradients that were reduced are needed no more.
        """
        assert grads.store is not None
        if grads.store.stream_ordered:
            return self._send_in_order(grads, grads.store, reduce, accumulate)
        landing = self._target(grads)
        work = reduce(landing.of(grads, _sum_dtype(grads)))
        kept = None
        if accumulate:
            for earlier in [pair for pair in self._arriving if pair[0] is grads]:
                earlier[1].wait_stream()
                self._arriving.remove(earlier)
            for earlier_landing in self._landings:
                if earlier_landing.grads is grads:
                    earlier_landing.settle()
        if accumulate or _sum_dtype(grads) is not grads.dtype:
            kept = self._target(grads)
        read = None
        if accumulate:
            assert kept is not None
            read = grads.store.read(grads.grad_shard, kept.of(grads, grads.dtype))
        self._arriving.append((grads, Then(work, partial(self._write, grads, landing, kept, read))))
        return work

    def _write(self, grads: UnitGradients, landing: _Landing, kept: _Landing | None, read: Work | None) -> None:
        """Start to write the sum that has arrived in ``landing``.

        Args:
            kept: where it is added or cast, if not written as it is.
            read: what brings the earlier sum to ``kept``, to be added to.
        """
        if kept is not None:
            found, total = landing.of(grads, _sum_dtype(grads)), kept.of(grads, grads.dtype)
            if read is None:
                total.copy_(found)
            else:
                _await(read, grads)
                total.add_(found)
            landing.busy, landing = False, kept
        written = landing.of(grads, grads.dtype)
        grads.squared_norm = ops.squared_norm(written)
        assert grads.store is not None
        landing.grads, landing.busy = grads, False
        landing.write = grads.store.write(written, grads.grad_shard)

    def _send_in_order(
        self, grads: UnitGradients, store: OffloadStore, reduce: Callable[[torch.Tensor], Work], accumulate: bool
    ) -> Work:
        with store.on_copy_stream("out"), poison_on_error(store):
            total = found = self._lane(0, store, grads, _sum_dtype(grads))
            reduce(found).wait_stream()
            arrived = store.record_event()
            if accumulate or found.dtype is not grads.dtype:
                total = self._lane(1, store, grads, grads.dtype)
            if accumulate:
                store.read(grads.grad_shard, total).wait_stream()
                total.add_(found)
            elif total is not found:
                total.copy_(found)
            grads.squared_norm = ops.squared_norm(total)
            self._written[grads] = store.write(total, grads.grad_shard)
        return arrived

    def _lane(self, number: int, store: OffloadStore, grads: UnitGradients, dtype: torch.dtype) -> torch.Tensor:
        """Memory that is used in line: the next use comes behind the last one."""
        need = padded_nbytes(grads.grad_shard.numel() * dtype.itemsize)
        while len(self._in_line) <= number:
            self._in_line.append(store.staging_buffer(need))
        if self._in_line[number].nbytes < need:
            self._in_line[number] = store.staging_buffer(need)
        return _part(self._in_line[number], grads, dtype)

    def _target(self, grads: UnitGradients) -> _Landing:
        """Where the next sum of ``grads`` is to be reduced to."""
        for arriving in [pair for pair in self._arriving if pair[1].done()]:
            arriving[1].wait_stream()
            self._arriving.remove(arriving)
        need = padded_nbytes(grads.grad_shard.numel() * _sum_dtype(grads).itemsize)
        fitting = [landing for landing in self._landings if need <= landing.memory.nbytes <= 4 * need]
        free = [landing for landing in fitting if not landing.busy]
        free.sort(key=lambda landing: landing.write is not None and not landing.write.done())
        if not free or (free[0].write is not None and len(fitting) < NUM_LANDINGS):
            assert grads.store is not None
            self._landings.append(_Landing(grads.store.staging_buffer(need)))
            return self._landings[-1]
        free[0].settle()
        free[0].busy = True
        return free[0]

    def settle(self) -> None:
        """Returns when everything has arrived and is where it is kept."""
        while self._arriving:
            self._arriving.pop(0)[1].wait_stream()
        for landing in self._landings:
            landing.settle()
        while self._written:
            grads, written = self._written.popitem()
            _await(written, grads)
