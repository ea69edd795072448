"""Gathers of parameters whose shards are not on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroengine.comm.interfaces import Transport
from zeroengine.disk.aligned_memory import ALIGNMENT
from zeroengine.offload.disk_store import OffloadStore, padded_nbytes
from zeroengine.utils.work import Work

PATIENCE_S = 1.0


@dataclass(eq=False)
class _Slot:
    """Memory that a shard is read into and sent from."""

    memory: torch.Tensor  # bytes
    work: Work | None = None
    busy: bool = False


class OffloadedShards:
    """Parameter shards in a store: read, ahead of use where told, and gathered from there.

    Args:
        num_slots: shards in memory at once; more only where a peer is slow to take them.
    """

    def __init__(self, store: OffloadStore, transport: Transport, num_slots: int) -> None:
        self._store, self._transport = store, transport
        self.medium = store.medium
        self._num_slots = num_slots
        self._alone = transport.world_size == 1
        self.can_gather_ahead = self._alone or (transport.overlaps and store.medium == "cpu")
        """Whether a gather may be issued ahead of use: else the host would wait for the disk, or for its peers."""
        self._slots: list[_Slot] = []
        self._ahead: dict[int, tuple[_Slot, Work]] = {}  # by the shard's address

    @property
    def nbytes(self) -> int:
        return sum(slot.memory.nbytes for slot in self._slots)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A shard's place."""
        return self._store.empty(numel, dtype)

    def fill(self, shard: torch.Tensor, values: torch.Tensor) -> None:
        """``values`` become those of a shard, whatever was read ahead of it."""
        self.discard_prefetched(shard)
        self._store.fill(shard, values)

    @property
    def stream_ordered(self) -> bool:
        """See ``OffloadStore``."""
        return self._store.stream_ordered

    def staging_buffer(self, shard: torch.Tensor) -> torch.Tensor:
        """New memory on the device for a shard."""
        return self._store.staging_buffer(padded_nbytes(shard.nbytes))[: shard.nbytes].view(shard.dtype)

    def read(self, shard: torch.Tensor, into: torch.Tensor) -> Work:
        """Starts to bring a shard."""
        return self._store.read(shard, into)

    def write(self, source: torch.Tensor, shard: torch.Tensor) -> Work:
        """Starts to take back a shard. What was read ahead of it must have been forgotten."""
        return self._store.write(source, shard)

    def prefetch(self, shard: torch.Tensor) -> None:
        """Starts to read a shard that will soon be gathered, where there is room for it."""
        if shard.data_ptr() not in self._ahead and len(self._ahead) < self._num_slots - 1:
            self._ahead[shard.data_ptr()] = self._start(shard)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Work:
        """As ``Channel.all_gather``."""
        if self._alone:
            return self._store.read(shard, full)  # the shard is all of the full buffer
        ahead = self._ahead.pop(shard.data_ptr(), None)
        slot, transfer = ahead if ahead is not None else self._start(shard)
        mine = slot.memory[: shard.nbytes].view(shard.dtype)
        with self._store.on_copy_stream("in"):
            try:
                transfer.wait_stream()
            finally:
                slot.busy = False
            slot.work = self._transport.gather.all_gather(full, mine, label)
        return slot.work

    def discard_prefetched(self, shard: torch.Tensor | None = None) -> None:
        """What was read ahead, of one shard or of all, is of old values."""
        if shard is None:
            ahead, self._ahead = self._ahead, {}
        else:
            address = shard.data_ptr()
            ahead = {address: self._ahead.pop(address)} if address in self._ahead else {}
        for slot, _ in ahead.values():
            slot.busy = False
        for _, transfer in ahead.values():
            transfer.wait_host()

    def poison(self, error: BaseException) -> None:
        """See ``OffloadStore``."""
        self._store.poison(error)

    def _start(self, shard: torch.Tensor) -> tuple[_Slot, Work]:
        slot = self._slot_for(shard.nbytes)
        slot.busy = True
        return slot, self._store.read(shard, slot.memory[: shard.nbytes].view(shard.dtype))

    def _slot_for(self, nbytes: int) -> _Slot:
        """A free one, the longest in use first."""
        fitting = [slot for slot in self._slots if not slot.busy and slot.memory.nbytes >= padded_nbytes(nbytes)]
        patience = PATIENCE_S if len(self._slots) >= self._num_slots else 0.0
        for slot in fitting:
            if self._reusable(slot, 0.0):
                return self._last(slot)
        for slot in fitting[:1]:
            if self._reusable(slot, patience):
                return self._last(slot)
        size = padded_nbytes(nbytes)
        memory = self._transport.empty(size + ALIGNMENT, torch.uint8, "gather")
        skip = -memory.data_ptr() % ALIGNMENT
        self._slots.append(_Slot(memory[skip : skip + size]))
        return self._slots[-1]

    def _reusable(self, slot: _Slot, patience: float) -> bool:
        if slot.work is None:
            return True
        if not patience:
            return self._transport.gather.reusable(slot.work, 0.0)
        with self._store.on_copy_stream("in"):  # which the shard comes by
            return self._transport.gather.reusable(slot.work, patience)

    def _last(self, slot: _Slot) -> _Slot:
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot
