"""Summed gradients on their way to disk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..comm import Work
from ..offload import Transfer, aligned_empty, padded
from .gradients import UnitGradients

NUM_LANDINGS = 3  # of one size; more only while reduces stay under way


@dataclass(eq=False)
class _Landing:
    """Memory that a sum lands in and is written from."""

    memory: torch.Tensor  # bytes
    busy: bool = True  # with a sum that has not arrived
    write: Transfer | None = None
    grads: UnitGradients | None = None  # that are on their way from it

    def of(self, grads: UnitGradients) -> torch.Tensor:
        return self.memory[: grads.kept.nbytes].view(grads.dtype)

    def settle(self) -> None:
        """Returns when what was in it is on disk."""
        write, self.write = self.write, None
        if write is not None:
            assert self.grads is not None
            _await(write, self.grads)


def _await(transfer: Transfer, grads: UnitGradients) -> None:
    """Where it fails a gradient is lost, and no step may be taken with what is left."""
    try:
        transfer.wait()
    except BaseException as error:
        assert grads.disk is not None
        grads.disk.fail(error)
        raise


class _Arriving:
    """A reduce whose result goes to disk. ``wait`` returns when it is there, and on its way."""

    def __init__(self, work: Work, grads: UnitGradients, landing: _Landing, before: _Landing | None) -> None:
        self.grads, self.landing = grads, landing
        self._work, self._before = work, before
        self._taken = False
        self._read: Transfer | None = None
        if before is not None:
            assert grads.disk is not None
            self._read = grads.disk.read(grads.kept, before.of(grads))

    def wait(self) -> None:
        if self._taken:
            return
        self._taken = True
        self._work.wait()
        mine = self.landing.of(self.grads)
        if self._read is not None and self._before is not None:
            _await(self._read, self.grads)
            mine.add_(self._before.of(self.grads))
            self._before.busy = False
        self.grads.squared_norm = ops.squared_norm(mine)
        assert self.grads.disk is not None
        self.landing.grads = self.grads
        self.landing.write = self.grads.disk.write(mine, self.grads.kept)
        self.landing.busy = False

    def is_completed(self) -> bool:
        return self._taken or self._work.is_completed()


class Landings:
    """The memory that sums land in before they are written. It is kept."""

    def __init__(self) -> None:
        self._landings: list[_Landing] = []
        self._arriving: list[_Arriving] = []

    @property
    def nbytes(self) -> int:
        return sum(landing.memory.nbytes for landing in self._landings)

    def target(self, grads: UnitGradients) -> _Landing:
        """Where the next sum of ``grads`` is to be reduced to."""
        for arriving in [a for a in self._arriving if a.is_completed()]:
            arriving.wait()
            self._arriving.remove(arriving)
        need = padded(grads.kept.nbytes)
        fitting = [landing for landing in self._landings if need <= landing.memory.nbytes <= 4 * need]
        free = [landing for landing in fitting if not landing.busy]
        free.sort(key=lambda landing: landing.write is not None and not landing.write.done())
        if not free or (free[0].write is not None and len(fitting) < NUM_LANDINGS):
            self._landings.append(_Landing(aligned_empty(need, torch.uint8)))
            return self._landings[-1]
        free[0].settle()
        free[0].busy = True
        return free[0]

    def send(self, work: Work, grads: UnitGradients, landing: _Landing, accumulate: bool) -> None:
        """Sees to it that what ``work`` brings into ``landing`` gets to the disk; added to what is there already."""
        before = None
        if accumulate:
            for earlier in [a for a in self._arriving if a.grads is grads]:
                earlier.wait()
                self._arriving.remove(earlier)
            for earlier_landing in self._landings:
                if earlier_landing.grads is grads:
                    earlier_landing.settle()
            before = self.target(grads)
        self._arriving.append(_Arriving(work, grads, landing, before))

    def settle(self) -> None:
        """Returns when everything has arrived and is on disk."""
        while self._arriving:
            self._arriving.pop(0).wait()
        for landing in self._landings:
            landing.settle()
