"""Gathers of parameters whose shards are on disk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..comm import Transport, Work
from .aio import ALIGNMENT, Transfer
from .store import DiskStore, padded

PATIENCE_S = 1.0


@dataclass
class _Slot:
    """Memory that a shard is read into and sent from."""

    memory: torch.Tensor  # bytes
    work: Work | None = None
    busy: bool = False


@dataclass
class _Arriving:
    """A shard that is read straight into the full buffer, for it is all of it."""

    transfer: Transfer

    def wait(self) -> None:
        self.transfer.wait()

    def is_completed(self) -> bool:
        return self.transfer.done()


class DiskShards:
    """Parameter shards on disk: read, ahead of use where told, and gathered from there.

    Args:
        num_slots: shards in memory at once; more only where a peer is slow to take them.
    """

    def __init__(self, disk: DiskStore, transport: Transport, num_slots: int) -> None:
        self._disk, self._transport = disk, transport
        self._num_slots = num_slots
        self.alone = transport.world_size == 1
        self._slots: list[_Slot] = []
        self._ahead: dict[int, tuple[_Slot, Transfer]] = {}  # by the shard's address

    @property
    def nbytes(self) -> int:
        return sum(slot.memory.nbytes for slot in self._slots)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A shard's place on disk."""
        return self._disk.empty(numel, dtype)

    def let_go(self, shard: torch.Tensor) -> None:
        """Gives back the memory that using a shard in place took."""
        self._disk.let_go(shard)

    def ahead(self, shard: torch.Tensor) -> None:
        """Starts to read a shard that will soon be gathered, where there is room for it."""
        if shard.data_ptr() not in self._ahead and len(self._ahead) < self._num_slots - 1:
            self._ahead[shard.data_ptr()] = self._start(shard)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Work:
        """As ``Channel.all_gather``."""
        if self.alone:
            return _Arriving(self._disk.read(shard, full))
        ahead = self._ahead.pop(shard.data_ptr(), None)
        slot, transfer = ahead if ahead is not None else self._start(shard)
        try:
            transfer.wait()
        finally:
            slot.busy = False
        mine = slot.memory[: shard.nbytes].view(shard.dtype)
        slot.work = self._transport.gather.all_gather(full, mine, label)
        return slot.work

    def forget(self) -> None:
        """What was read ahead is of old values."""
        for slot, transfer in self._ahead.values():
            transfer.wait()
            slot.busy = False
        self._ahead.clear()

    def _start(self, shard: torch.Tensor) -> tuple[_Slot, Transfer]:
        slot = self._slot_for(shard.nbytes)
        slot.busy = True
        return slot, self._disk.read(shard, slot.memory[: shard.nbytes].view(shard.dtype))

    def _slot_for(self, nbytes: int) -> _Slot:
        fitting = [slot for slot in self._slots if not slot.busy and slot.memory.nbytes >= padded(nbytes)]
        patience = PATIENCE_S if len(self._slots) >= self._num_slots else 0.0
        for slot in fitting:
            if slot.work is None or self._transport.gather.reusable(slot.work, 0.0):
                return slot
        for slot in fitting[:1]:
            assert slot.work is not None
            if self._transport.gather.reusable(slot.work, patience):
                return slot
        size = padded(nbytes)
        memory = self._transport.empty(size + ALIGNMENT, torch.uint8)
        skip = -memory.data_ptr() % ALIGNMENT
        self._slots.append(_Slot(memory[skip : skip + size]))
        return self._slots[-1]
