"""What an optimizer keeps of one unit on one rank."""

from __future__ import annotations

from typing import Any

import torch

from zeroengine import ops
from zeroengine.disk.mapped_memory import populate
from zeroengine.offload.disk_store import Medium, OffloadStore
from zeroengine.offload.offload_states import resident_bytes
from zeroengine.offload.offloaded_shards import OffloadedShards
from zeroengine.optim.segments import Segment
from zeroengine.runtime.unit_gradients import UnitGradients


class OptimizerShard:
    """The optimizer's states of one unit on this rank, all 1-D of the optimizer shard's length.

    Args:
        number: among the optimizer's units.
        store: where master and moments live, if not on the device.
    """

    def __init__(
        self, number: int, grads: UnitGradients, moments_dtype: torch.dtype, store: OffloadStore | None = None
    ) -> None:
        unit = grads.unit
        self._moments_dtype = moments_dtype
        self.number, self.store = number, store
        self.grads, self.unit = grads, unit
        degree = unit.degrees.optimizer
        self.param = unit.shard_of_degree(degree)
        self.gradient = grads.shard_of_degree(degree)
        self.offset, _ = unit.layout.shard_range(unit.rank, degree)
        # DESIGN "One master": where parameters are fp32 they are the master.
        self.mixed = unit.is_mixed_precision
        self.master = self.param
        if self.mixed and store is not None and unit.master is not None and store.holds(unit.master):
            self.master, unit.master = unit.master, None
        elif self.mixed:
            self.master = self._empty(torch.float32)
            populate(self.master, write=True)
            self.master.copy_(self.param if unit.master is None else unit.master)
            unit.master = None
            if store is not None:
                store.evict(self.master)
        self.moments: list[torch.Tensor] = []
        self.steps = [0] * len(unit.params)
        self.segments: dict[tuple[Any, ...], list[Segment]] = {}

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        numel = self.param.numel()
        if self.store is not None:
            return self.store.empty(numel, dtype)
        tensor = torch.empty(numel, dtype=dtype, device=self.unit.full_buffer.device)
        ops.advise_huge_pages(tensor)
        return tensor

    def adam_moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.moments:
            self.moments = [self._empty(self._moments_dtype) for _ in range(2)]
            if self.store is None:  # a store's are
                for moment in self.moments:
                    moment.zero_()
        return self.moments[0], self.moments[1]

    @property
    def on_device(self) -> bool:
        """Whether all of it is where the model computes."""
        return self.store is None and self.grads.store is None and self.unit.offloaded_shards is None

    @property
    def param_only_offloaded(self) -> OffloadedShards | None:
        """Where the parameter shard is, if it alone is elsewhere: it is brought to the update, then."""
        stored = self.unit.offloaded_shards
        alone = self.store is None and self.grads.store is None and stored is not None and stored.stream_ordered
        return stored if alone else None

    def bytes_in(self, medium: Medium | None) -> dict[str, int]:
        """Of master and moments in a kind of memory; None: on the device."""
        medium_of = None if self.store is None else self.store.medium
        here = medium_of == medium
        master = resident_bytes(self.master) if here and self.master is not self.param else 0
        return {"master": master, "optimizer": sum(map(resident_bytes, self.moments)) if here else 0}

    def gradient_for_norm(self, world_size: int) -> torch.Tensor:
        """This rank's 1/world of the summed gradients: the same elements at every stage."""
        kept = self.grads.grad_shard
        if not self.grads.unsharded:
            return kept
        size = self.unit.layout.numel // world_size
        return kept[self.unit.rank * size : (self.unit.rank + 1) * size]

    @property
    def may_be_written(self) -> bool:
        """Whether low-precision parameters can be written from outside, other than inside ``gathered``.

        See "Values written into the model" in ``runtime/outside_writes.py``.
        """
        return self.mixed and not self.unit.releasable

    def reload_master(self) -> None:
        """Take over published parameters that were written from outside; the others keep their master's bits."""
        if self.mixed:
            populate(self.master, write=True)
            ops.reload_written(self.master, self.param.to(self.master.device))
