"""One unit's shard at the optimizer's degree: what an update reads and writes, besides the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zeroengine import ops
from zeroengine.disk.mapped_memory import populate
from zeroengine.offload.interfaces import Medium, OffloadStore
from zeroengine.offload.offloaded_shards import OffloadedShards
from zeroengine.offload.state_offloader import resident_bytes
from zeroengine.partition.layout import ShardSpan
from zeroengine.runtime.unit_gradients import UnitGradients


class OptimizerShard:
    """This rank's part of one unit's parameters, masters and gradients, all 1-D and of one length.

    Args:
        number: The unit's place among the trainable units.
        grads: The unit's gradients.
        store: The store of masters and optimizer state. None: they are on the device.

    Attributes:
        param: The parameters that the model computes with.
        master: The fp32 masters. The same tensor as ``param`` where parameters are fp32 already (or wider).
        mixed: Whether there is a master besides the parameters.
        gradient: The summed gradients.
        offset: The index of the shard's first element within the unit's flat buffer.
    """

    def __init__(self, number: int, grads: UnitGradients, store: OffloadStore | None = None) -> None:
        unit = grads.unit
        degree = unit.degrees.optimizer
        self.number, self.store, self.grads, self.unit = number, store, grads, unit
        self.param = unit.shard_of_degree(degree)
        self.gradient = grads.shard_of_degree(degree)
        self.offset, _ = unit.layout.shard_range(unit.rank, degree)
        self.mixed = unit.is_mixed_precision
        self.master = self._take_master() if self.mixed else self.param

    def _take_master(self) -> torch.Tensor:
        """Return the master. The unit has one already where its parameters were built in a wider dtype."""
        # The unit forgets its master, or a copy to another place would leave the first one in memory.
        built, self.unit.master = self.unit.master, None
        if built is not None and self.store is not None and self.store.holds(built):
            return built
        master = self.empty(torch.float32)
        # Writing a mapped file whose disk fails would end the process by a signal; `populate` raises instead.
        populate(master, write=True)
        master.copy_(self.param if built is None else built)
        if self.store is not None:
            # All masters together may be larger than memory. This one is not read before the update.
            self.store.evict(master)
        return master

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Return new memory for a value of each element, in the store (then zeros) or on the device (uninitialised)."""
        numel = self.param.numel()
        if self.store is not None:
            return self.store.empty(numel, dtype)
        tensor = torch.empty(numel, dtype=dtype, device=self.unit.full_buffer.device)
        ops.advise_huge_pages(tensor)
        return tensor

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """Return new zeros, one for each element, in the store or on the device."""
        tensor = self.empty(dtype)
        # Memory of a store reads as zeros until it is written, and writing it would load it from disk.
        return tensor if self.store is not None else tensor.zero_()

    def spans(self) -> Iterator[ShardSpan]:
        """Return the parts of parameters that lie in this shard, at most one of each parameter."""
        return self.unit.layout.spans(self.unit.rank, self.unit.degrees.optimizer)

    @property
    def low_precision_param(self) -> torch.Tensor | None:
        """The bf16 or fp16 copy that an update writes beside the master; None where the master is the parameter."""
        return self.param if self.mixed else None

    @property
    def medium(self) -> Medium | None:
        """The kind of memory that masters and optimizer state live in; None for the device's."""
        return None if self.store is None else self.store.medium

    @property
    def master_bytes(self) -> int:
        """The bytes that masters take besides the parameters."""
        return resident_bytes(self.master) if self.mixed else 0

    @property
    def on_device(self) -> bool:
        """Whether parameters, gradients, masters and optimizer state are all on the device."""
        return self.store is None and self.grads.store is None and self.unit.offloaded_shards is None

    @property
    def store_if_only_param_offloaded(self) -> OffloadedShards | None:
        """The store of the parameter shard if nothing else is offloaded: the update then brings it to the device."""
        stored = self.unit.offloaded_shards
        # The store's transfers must be in the order of the device's stream, for the update is issued between them.
        alone = self.store is None and self.grads.store is None and stored is not None and stored.stream_ordered
        return stored if alone else None

    def gradient_for_norm(self, world_size: int) -> torch.Tensor:
        """Return this rank's 1/``world_size`` of the summed gradients: the same elements at every stage."""
        # A gradient shard is 1/world of the elements already. Of unsharded gradients at least this rank's slice is
        # summed.
        gradient = self.grads.grad_shard
        if not self.grads.unsharded:
            return gradient
        size = self.unit.layout.numel // world_size
        return gradient[self.unit.rank * size : (self.unit.rank + 1) * size]

    @property
    def may_be_written(self) -> bool:
        """Whether low-precision parameters can be written from outside, other than inside ``gathered``.

        See "Values written into the model" in ``runtime/outside_writes.py``.
        """
        return self.mixed and not self.unit.is_releasable

    def reload_master(self) -> None:
        """Copy into the master the parameters that were written from outside. All others keep their master's bits."""
        if self.mixed:
            # The master may be a mapped part of a file. See "SIGBUS" in ``disk/mapped_memory.py``.
            populate(self.master, write=True)
            ops.reload_written(self.master, self.param.to(self.master.device))
