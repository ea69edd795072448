"""The gradients of one unit on one rank: memory and bookkeeping, no communication.

[Note: Flags of a unit's gradients]
Lists have one entry for each parameter. The reducer calls every method named here.

    attribute             set by ...                                      cleared by ...
    deferred_grads        a gradient inside no_sync, or a late one        the next copy of it, or a drop
    slot_filled           the copy of a gradient to where it is           the launch of its reduce (if sharded), or
                          reduced from                                    ``end_step`` (if not)
    has_grad              the same copy: this rank had a gradient         ``end_step``
    launched_in_step      the launch of a reduce                          ``end_step``
    squared_norm          an offloaded sum, before it leaves the device   the next offloaded sum, or a replaced gradient

``Reducer.replace_gradient``, which serves ``set_full_gradient`` and values that user code assigned, sets or clears
``has_grad``. It also clears ``squared_norm``, or moves the value to ``deferred_grads`` and clears ``slot_filled``.

``Reducer.end_step`` runs after an update and when gradients are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from zeroengine import ops
from zeroengine.comm.interfaces import Transport
from zeroengine.offload.interfaces import OffloadStore, padded_nbytes
from zeroengine.offload.placement_plan import can_offload_gradients
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.slices import slice_of
from zeroengine.runtime.full_buffer import param_views
from zeroengine.runtime.unit import Unit


class GradientFormat(NamedTuple):
    """How a rank keeps the gradients of one unit and sends them, which needs no tensor to say.

    Attributes:
        dtype: The dtype in which gradients accumulate and are kept.
        reduce_dtype: The dtype that is sent.
        is_sharded: Whether each micro-step is reduced to this rank's shard. Otherwise the gradients of the whole unit
            accumulate, and only the last micro-step is reduced. In one process the shard is the whole unit, which
            counts as sharded if its sums are offloaded.
        is_offloaded: Whether the sums are in the unit's store.
    """

    dtype: torch.dtype
    reduce_dtype: torch.dtype
    is_sharded: bool
    is_offloaded: bool

    @classmethod
    def of_unit(
        cls,
        unit_dtype: torch.dtype,
        degrees: Degrees,
        world_size: int,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype | None,
        *,
        has_store: bool,
    ) -> GradientFormat:
        """Return the format of a unit. For ``dtype`` and ``reduce_dtype`` see ``UnitGradients``.

        Args:
            unit_dtype: The dtype that the unit computes in.
            degrees: The unit's degrees.
            world_size: The number of ranks.
            dtype: The dtype in which gradients accumulate.
            reduce_dtype: The dtype that is sent; None: the one that needs no cast.
            has_store: Whether the unit's optimizer states are in a store.
        """
        is_offloaded = has_store and can_offload_gradients(degrees, world_size)
        is_sharded = degrees.gradients > 1 or is_offloaded
        return cls(dtype, reduce_dtype or (unit_dtype if is_sharded else dtype), is_sharded, is_offloaded)

    @property
    def reduced_in_place(self) -> bool:
        """Whether gradients are reduced where they are kept, rather than in a gradient buffer."""
        return not self.is_sharded and self.dtype is self.reduce_dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype to reduce offloaded gradients into: wide enough that the sum is rounded only when it is stored."""
        return torch.promote_types(self.reduce_dtype, self.dtype)

    def staging_bytes(self, numel: int, *, accumulates: bool, on_stream: bool) -> tuple[int, int]:
        """Return the bytes of the staging buffers that an offloaded sum of ``numel`` elements passes through.

        Args:
            numel: The elements of the sum that this rank keeps.
            accumulates: Whether the sum is added to that of earlier micro-steps.
            on_stream: Whether a stream orders the copies, as on a GPU.

        Returns:
            The bytes of the buffer that is reduced into, and those of the one that takes the total in the dtype that is
            kept; 0: the sum is the total.
        """
        # Without a stream one buffer serves as either in turn.
        total_dtype = self.dtype if on_stream else self.sum_dtype
        has_total = accumulates or self.sum_dtype is not self.dtype
        return (
            padded_nbytes(numel * self.sum_dtype.itemsize),
            padded_nbytes(numel * total_dtype.itemsize) if has_total else 0,
        )


class UnitGradients:
    """The summed gradients that this rank keeps of one unit.

    Args:
        dtype: The dtype in which gradients accumulate and are kept.
        reduce_dtype: The dtype that is sent. None chooses the dtype that needs no cast.
        store: The store of the sums. None: they stay on the device. Ignored where every rank keeps all gradients.

    Attributes:
        transport: Moves bytes between the ranks that the unit is partitioned over.
        format: The dtypes, and what follows from them.
        flat_grads: 1-D: this rank's shard of the summed gradients; the whole flat layout if they are not sharded.
        param_views: The parameters' views of ``flat_grads``; empty where gradients are sharded.
        deferred_grads: By the parameter's index, in its shape, of ``dtype``.
        squared_norm: 0-D, float64.
        has_slices: Whether parameters are slices of the model's, so that gradients may have other shapes.
    """

    def __init__(
        self,
        unit: Unit,
        transport: Transport,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype | None,
        store: OffloadStore | None = None,
    ) -> None:
        self.unit = unit
        layout, degrees = unit.layout, unit.degrees
        self.transport = transport
        self.format = GradientFormat.of_unit(
            unit.dtype, degrees, transport.world_size, dtype, reduce_dtype, has_store=store is not None
        )
        is_sharded = self.format.is_sharded
        self.store = store if self.format.is_offloaded else None
        numel = layout.shard_numel(degrees.gradients)
        if self.store is not None:
            self.flat_grads = self.store.empty(numel, dtype)
        elif dtype is self.format.reduce_dtype:
            self.flat_grads = transport.empty(numel, dtype, sent=not is_sharded)
        else:
            self.flat_grads = torch.empty(numel, dtype=dtype, device=unit.full_buffer.tensor.device)
        self.param_views = [] if is_sharded else param_views(layout, self.flat_grads)
        if self.store is None:
            ops.advise_huge_pages(self.flat_grads)
            # The norm also reads the padding, which copies of gradients never write.
            self.flat_grads.zero_()
        # Of each optimizer shard this rank counts a part that no other one does: its place in ``flat_grads``.
        start, stop = layout.unreplicated_range(unit.rank, degrees.optimizer, transport.world_size)
        base = layout.shard_range(unit.rank, degrees.gradients)[0] if is_sharded else 0
        self._unreplicated = slice(start - base, stop - base)
        # The note at the top of this file says what sets and clears the following attributes.
        self._num_params = num_params = len(unit.params)
        self.has_slices = any(slice_of(param) is not None for param in unit.params)
        self.squared_norm: torch.Tensor | None = None
        self.deferred_grads: dict[int, torch.Tensor] = {}
        self.slot_filled = [False] * num_params
        self.has_grad = [False] * num_params
        self.launched_in_step = False

    @property
    def numel(self) -> int:
        """The elements of the unit's flat buffer, padding included."""
        return self.unit.numel

    def forget_filled(self) -> None:
        """Let the next gradients overwrite what is where they are copied to."""
        self.slot_filled[:] = [False] * self._num_params

    def end_step(self) -> None:
        """Let the next gradients overwrite those of the step that ended."""
        self.forget_filled()
        self.has_grad[:] = [False] * self._num_params
        self.launched_in_step = False

    def unreplicated_part(self, flat_grads: torch.Tensor) -> torch.Tensor:
        """Return the part of ``flat_grads`` (1-D, such as the attribute) that no other rank counts: a view."""
        return flat_grads[self._unreplicated]

    def shard_of_degree(self, degree: int) -> torch.Tensor:
        """Return this rank's shard, at ``degree``, of the summed gradients (1-D, a view)."""
        unit = self.unit
        start, stop = unit.layout.shard_range(unit.rank, degree)
        base = unit.layout.shard_range(unit.rank, unit.degrees.gradients)[0] if self.format.is_sharded else 0
        return self.flat_grads[start - base : stop - base]
