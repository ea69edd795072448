"""Summed gradients on their way from the device to where they are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zeroengine import ops
from zeroengine.comm.interfaces import Work
from zeroengine.offload.device_copies import Transfer
from zeroengine.offload.disk_store import OffloadStore, padded_nbytes, poison_on_error
from zeroengine.runtime.unit_gradients import UnitGradients

NUM_LANDINGS = 3  # of one size; more only while reduces stay under way


@dataclass(eq=False)
class _Landing:
    """Memory that a sum lands in and is written from."""

    memory: torch.Tensor  # bytes
    busy: bool = True  # with a sum that has not arrived
    write: Transfer | None = None
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


def _await(transfer: Transfer, grads: UnitGradients) -> None:
    """Where it fails a gradient is lost, and no step may be taken with what is left."""
    assert grads.store is not None
    with poison_on_error(grads.store):
        transfer.wait()


class _Arriving:
    """A reduce whose result is written to a store. ``wait`` returns when it is there, and on its way.

    Args:
        landing: what it is reduced to.
        kept: another, for what is written where that is not the sum itself.
        accumulate: whether the sum is added to what is in the store.
    """

    def __init__(
        self, work: Work, grads: UnitGradients, landing: _Landing, kept: _Landing | None, accumulate: bool
    ) -> None:
        self.grads = grads
        self._work, self._landing, self._kept = work, landing, kept
        self._taken = False
        self._read: Transfer | None = None
        if accumulate:
            assert grads.store is not None and kept is not None
            self._read = grads.store.read(grads.grad_shard, kept.of(grads, grads.dtype))

    def wait(self) -> None:
        if self._taken:
            return
        self._taken = True
        self._work.wait()
        grads, last = self.grads, self._landing
        if self._kept is not None:
            found, total = last.of(grads, _sum_dtype(grads)), self._kept.of(grads, grads.dtype)
            if self._read is None:
                total.copy_(found)
            else:
                _await(self._read, grads)
                total.add_(found)
            last.busy, last = False, self._kept
        grads.squared_norm = ops.squared_norm(last.of(grads, grads.dtype))
        assert grads.store is not None
        last.grads, last.busy = grads, False
        last.write = grads.store.write(last.of(grads, grads.dtype), grads.grad_shard)

    def is_completed(self) -> bool:
        return self._taken or self._work.is_completed()


@dataclass(frozen=True)
class OnItsWay:
    """A reduce whose result is being written to a store, in the order of streams. Done when it has arrived."""

    work: Work
    arrived: Transfer

    def wait(self) -> None:
        self.arrived.follow()

    def is_completed(self) -> bool:
        return self.arrived.done()


class Landings:
    """The memory that sums land in before they are written. It is kept.

    Where streams order transfers everything is issued at once, beside the backward. Elsewhere a sum is written when
    somebody sees that it has arrived.
    """

    def __init__(self) -> None:
        self._landings: list[_Landing] = []
        self._arriving: list[_Arriving] = []
        self._in_line: list[torch.Tensor] = []  # for a sum, and for what it is added to
        self._written: dict[UnitGradients, Transfer] = {}  # in the order of streams

    @property
    def nbytes(self) -> int:
        memory = [landing.memory for landing in self._landings] + self._in_line
        return sum(tensor.nbytes for tensor in memory)

    def send(self, grads: UnitGradients, reduce: Callable[[torch.Tensor], Work], accumulate: bool) -> Work:
        """Reduces gradients, and sees to it that their sum gets to its store; added to what is there already.

        Args:
            reduce: starts a reduce into the tensor it is given.

        Returns:
            The reduce.
        """
        assert grads.store is not None
        if grads.store.in_order:
            return self._send_in_order(grads, grads.store, reduce, accumulate)
        landing = self._target(grads)
        work = reduce(landing.of(grads, _sum_dtype(grads)))
        kept = None
        if accumulate:
            for earlier in [a for a in self._arriving if a.grads is grads]:
                earlier.wait()
                self._arriving.remove(earlier)
            for earlier_landing in self._landings:
                if earlier_landing.grads is grads:
                    earlier_landing.settle()
        if accumulate or _sum_dtype(grads) is not grads.dtype:
            kept = self._target(grads)
        self._arriving.append(_Arriving(work, grads, landing, kept, accumulate))
        return work

    def _send_in_order(
        self, grads: UnitGradients, store: OffloadStore, reduce: Callable[[torch.Tensor], Work], accumulate: bool
    ) -> Work:
        with store.beside("out"), poison_on_error(store):
            total = found = self._lane(0, store, grads, _sum_dtype(grads))
            work = reduce(found)
            work.wait()
            arrived = store.mark()
            if accumulate or found.dtype is not grads.dtype:
                total = self._lane(1, store, grads, grads.dtype)
            if accumulate:
                store.read(grads.grad_shard, total).follow()
                total.add_(found)
            elif total is not found:
                total.copy_(found)
            grads.squared_norm = ops.squared_norm(total)
            self._written[grads] = store.write(total, grads.grad_shard)
        return OnItsWay(work, arrived)

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
        for arriving in [a for a in self._arriving if a.is_completed()]:
            arriving.wait()
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
            self._arriving.pop(0).wait()
        for landing in self._landings:
            landing.settle()
        while self._written:
            grads, written = self._written.popitem()
            _await(written, grads)
