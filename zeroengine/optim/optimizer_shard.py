"""One unit's shard at the optimizer's degree: the tensors of an update, except for the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zeroengine import ops
from zeroengine.config.ema import Ema
from zeroengine.disk.mapped_memory import populate
from zeroengine.offload.interfaces import Medium, OffloadStore
from zeroengine.partition.layout import ShardSpan
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.unit_gradients import UnitGradients

# The names of states in ``Unit.moved_states``, beside those of moments.
MASTER, AVERAGE = "master", "average"


def empty_state(unit: Unit, store: OffloadStore | None, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a state of a unit's optimizer shard: zeros in the store, or uninitialized memory on the device.

    Args:
        unit: The unit.
        store: The store of its masters and optimizer state. None: they are on the device.
        numel: The number of values.
        dtype: Their dtype.
    """
    if store is not None:
        return store.empty(numel, dtype)
    tensor = torch.empty(numel, dtype=dtype, device=unit.full_buffer.tensor.device)
    ops.advise_huge_pages(tensor)
    return tensor


def zero_state(unit: Unit, store: OffloadStore | None, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in the store or on the device. The arguments are those of ``empty_state``."""
    tensor = empty_state(unit, store, numel, dtype)
    # New memory of a store reads as zeros, and writing it would load it from disk.
    return tensor if store is not None else tensor.zero_()


class OptimizerShard:
    """This rank's part of one unit's parameters, masters and gradients, all 1-D and of one length.

    Args:
        index: The unit's index among the trainable units.
        unit_grads: The unit's gradients.
        store: The store of masters and optimizer state. None: they are on the device.
        ema: The section of the moving average; None: there is no average.

    Attributes:
        param: The parameters that the model computes with.
        master: The fp32 masters. The same tensor as ``param`` where parameters are fp32 already (or wider).
        gradient: The summed gradients.
        average: The moving average of the masters, which begins with their values; None if there is none.
        average_weight: The weight of a step's masters in it.
        offset: The index of the shard's first element within the unit's flat buffer.
        low_precision_param: The bf16 or fp16 parameters that an update writes with the master; None if the master is
            the parameter.
        medium: The kind of memory that masters and optimizer state live in; None for the device's.
        on_device: Whether parameters, gradients, masters and optimizer state are all on the device.
        may_be_written: Whether code outside of ``gathered`` can write the low-precision parameters.
            See "Values written into the model" in ``runtime/outside_writes.py``.
        is_outdated: Whether the master lacks values that were written while it was offloaded.
    """

    def __init__(
        self, index: int, unit_grads: UnitGradients, store: OffloadStore | None = None, ema: Ema | None = None
    ) -> None:
        unit = unit_grads.unit
        degree = unit.degrees.optimizer
        self.index, self.store, self.unit_grads, self.unit = index, store, unit_grads, unit
        self.param = unit.shard_of_degree(degree)
        self.gradient = unit_grads.shard_of_degree(degree)
        self.offset, _ = unit.layout.shard_range(unit.rank, degree)
        self.master = self._take_master() if unit.has_master else self.param
        self.low_precision_param = self.param if unit.has_master else None
        moved_average = unit.moved_states.pop(AVERAGE, None)
        self.average = moved_average if ema is None or moved_average is not None else self.empty(ema.torch_dtype)
        self.average_weight = 0.0 if ema is None else 1 - ema.decay
        if moved_average is None:
            self.restart_average()
        self.medium: Medium | None = None if store is None else store.medium
        self.on_device = store is None and unit_grads.store is None and unit.offloaded_shards is None
        self.may_be_written = unit.has_master and not unit.is_releasable
        self.is_outdated = False
        # The unit drops its reference, so that a master that was copied is freed. It does so last, because a unit
        # without a master cannot be restored if anything above fails.
        unit.initial_master = None

    def _take_master(self) -> torch.Tensor:
        """Return the master. The unit already has one if its parameters were built in a wider dtype."""
        if MASTER in self.unit.moved_states:
            return self.unit.moved_states.pop(MASTER)
        initial_master = self.unit.initial_master
        if initial_master is not None and self.store is not None and self.store.holds(initial_master):
            return initial_master
        master = self.empty(torch.float32)
        # Writing a mapped file whose disk fails would end the process by a signal; `populate` raises instead.
        populate(master, write=True)
        master.copy_(self.param if initial_master is None else initial_master)
        # All masters together may exceed memory, and this one is not read before the update.
        self.evict(master)
        return master

    def restart_average(self, elements: slice = slice(None)) -> None:
        """Let the average, if there is one, begin again with the masters.

        Args:
            elements: Those of the shard that it concerns.
        """
        if self.average is not None:
            average, master = self.average[elements], self.master[elements]
            populate(master)
            populate(average, write=True)
            average.copy_(master)
            self.evict(average, master)

    def evict(self, *tensors: torch.Tensor) -> None:
        """Free the memory that using masters, moments or averages in place took, if they are in a store."""
        if self.store is not None:
            self.store.evict(*tensors)

    def empty(self, dtype: torch.dtype, numel: int | None = None) -> torch.Tensor:
        """Return memory for values of elements: zeros in the store, or uninitialized memory on the device.

        Args:
            dtype: The dtype of the values.
            numel: Their number. None: one for each element of the shard.
        """
        return empty_state(self.unit, self.store, self.param.numel() if numel is None else numel, dtype)

    def zeros(self, dtype: torch.dtype, numel: int | None = None) -> torch.Tensor:
        """Return zeros in the store or on the device. The arguments are those of ``empty``."""
        return zero_state(self.unit, self.store, self.param.numel() if numel is None else numel, dtype)

    def spans(self) -> Iterator[ShardSpan]:
        """Return the spans of parameters in this shard, at most one for each parameter."""
        return self.unit.layout.spans(self.unit.rank, self.unit.degrees.optimizer)

    @property
    def store_if_only_param_offloaded(self) -> OffloadStore | None:
        """The store of the parameter shard if nothing else is offloaded: the update then runs on the device."""
        shards = self.unit.offloaded_shards
        if shards is None or self.store is not None or self.unit_grads.store is not None:
            return None
        # The update is issued between the store's transfers, so they must be ordered by the device's streams.
        return shards.store if shards.store.copies is not None else None

    def gradient_for_norm(self) -> torch.Tensor:
        """Return the part of the summed gradients that this rank counts: one divided by the number of ranks."""
        return self.unit_grads.unreplicated_part(self.unit_grads.flat_grads)

    def reload_master(self) -> None:
        """Copy parameters that were written from outside into the master. Other elements keep the master's bits.

        A master that is offloaded for a while becomes outdated instead.
        """
        self.is_outdated = self.unit.has_master and not self.master.untyped_storage().nbytes()
        if self.unit.has_master and not self.is_outdated:
            # The master may be a mapped part of a file. See "SIGBUS" in ``disk/mapped_memory.py``.
            populate(self.master, write=True)
            ops.reload_written(self.master, self.param.to(self.master.device))
