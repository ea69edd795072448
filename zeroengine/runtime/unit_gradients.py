"""The gradients of one unit on one rank: memory and bookkeeping, no communication.

[Note: Flags of a unit's gradients]
Lists have one entry for each parameter. The reducer calls every method named here.

    attribute           true or set from ...                            cleared by ...
    num_pending         ``begin_backward``: parameters to wait for      ``count_arrival``, ``end_backward``, or a drop
    deferred_grads      a gradient inside no_sync, or a late one,       the next copy into a buffer, or a drop
                        if it accumulates in another dtype than its own
    buffer_filled       the copy of a gradient into the buffer          the launch of its reduce (if partitioned), or
                                                                        ``end_step`` (if unsharded)
    has_grad            the same copy: this rank has had a gradient     ``end_step``
    reduce_launched     the launch of the reduce in this backward       ``begin_backward``
    is_reduced          the launch of the first reduce in this step     ``end_step``
    squared_norm        an offloaded sum, before it leaves the device   the next offloaded sum, or a replaced gradient

``Reducer.replace_gradient``, which serves ``set_full_gradient``, sets ``has_grad``, and either clears ``squared_norm``
or moves the value to ``deferred_grads`` and clears ``buffer_filled``.

``Reducer.end_step`` runs after an update and when gradients are dropped.

[Note: Several gradients of one parameter]
In one backward autograd adds up all that a parameter gets before it passes on one gradient. But a backward may hold
others: each reentrant checkpoint runs one of its own, and so does a Function whose backward calls ``torch.autograd``.
A parameter that several of them use gets a gradient from each. So a unit is complete when as many gradients of each
parameter have arrived as in the backward before. The first time, gradients may arrive after their unit was reduced.
Such *late* gradients wait on this rank and are reduced with the next micro-step's, or before the update
(``Reducer.reduce_late_gradients``). No other rank knows of them. The backends on the host ask all ranks before a
step; ``AsyncAdam`` cannot without waiting, so there all ranks must have late gradients or none.
"""

from __future__ import annotations

import torch

from zeroengine import ops
from zeroengine.comm.interfaces import ChannelName, Transport
from zeroengine.offload.interfaces import OffloadStore
from zeroengine.offload.placement import can_offload_gradients
from zeroengine.runtime.unit import Unit


class UnitGradients:
    """The summed gradients that this rank keeps of one unit, and how far the micro-step in progress is.

    Args:
        dtype: The dtype of what is kept, in which gradients accumulate.
        reduce_dtype: The dtype that is sent. None chooses the one that needs no cast.
        store: The store of the sums. None: they stay on the device. Ignored where all ranks must keep them unsharded.
    """

    def __init__(
        self,
        unit: Unit,
        transport: Transport,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype | None,
        store: OffloadStore | None = None,
    ) -> None:
        self.unit, self.dtype = unit, dtype
        layout, degrees = unit.layout, unit.degrees
        self.store = store if can_offload_gradients(degrees, transport) else None
        self.unsharded = degrees.gradients == 1 and self.store is None
        self.reduce_dtype = reduce_dtype or (dtype if self.unsharded else unit.dtype)
        # Unsharded gradients of the right dtype are reduced where they are kept. Others go through a gradient buffer.
        self.reduced_in_place = self.unsharded and dtype is self.reduce_dtype
        # The channel whose memory holds ``flat_grads``. None: it takes part in no collective.
        self.channel: ChannelName | None = None
        # 1-D: this rank's shard of the summed gradients, or the whole flat layout where unsharded.
        self.flat_grads: torch.Tensor
        numel = layout.shard_numel(degrees.gradients)
        if self.store is not None:
            self.flat_grads = self.store.empty(numel, dtype)
        elif dtype is self.reduce_dtype:
            self.channel = "reduce"
            self.flat_grads = transport.empty(numel, dtype, self.channel, sent=self.unsharded)
        else:
            self.flat_grads = torch.empty(numel, dtype=dtype, device=unit.full_buffer.device)
        self.param_views = unit.param_views_of(self.flat_grads) if self.unsharded else []
        if self.store is None:
            ops.advise_huge_pages(self.flat_grads)
            # The norm reads the padding, too. Gradients are copied parameter by parameter, which leaves the padding
            # alone.
            self.flat_grads.zero_()
        # See the note at the top of this file for who sets and clears these.
        num_params = len(unit.params)
        # 0-D, float64.
        self.squared_norm: torch.Tensor | None = None
        # By the parameter's index, in its shape, of ``dtype``.
        self.deferred_grads: dict[int, torch.Tensor] = {}
        # The gradients that each parameter gets in one backward, learnt from the last one.
        self.expected_counts = [1] * num_params
        # The gradients that each parameter has got in this backward.
        self.arrived_counts = [0] * num_params
        self.num_pending = 0
        self.reduce_launched = False
        self.buffer_filled = [False] * num_params
        self.has_grad = [False] * num_params
        self.is_reduced = False

    def begin_backward(self) -> None:
        """Wait for as many gradients of each parameter as the last backward had."""
        self.arrived_counts = [0] * len(self.expected_counts)
        self.num_pending = len(self.expected_counts)
        self.reduce_launched = False

    def count_arrival(self, index: int) -> None:
        """Count one more gradient of parameter ``index`` in this backward."""
        self.arrived_counts[index] += 1
        # The test is for equality: a gradient beyond the expected number completes nothing. It is late if
        # the reduce of its unit was launched already.
        if self.arrived_counts[index] == self.expected_counts[index]:
            self.num_pending -= 1

    def end_backward(self) -> None:
        """Remember how many gradients of each parameter this backward had, and wait for no more."""
        # A parameter without a gradient in this backward may have one in the next, so at least one is waited for.
        self.expected_counts = [max(1, count) for count in self.arrived_counts]
        self.num_pending = 0

    def end_step(self) -> None:
        """Let the next gradients overwrite those of the step that has ended."""
        self.buffer_filled = [False] * len(self.buffer_filled)
        self.has_grad = [False] * len(self.has_grad)
        self.is_reduced = False

    def shard_of_degree(self, degree: int) -> torch.Tensor:
        """Return this rank's shard, at ``degree``, of the summed gradients (1-D, a view)."""
        unit = self.unit
        start, stop = unit.layout.shard_range(unit.rank, degree)
        # Unsharded gradients begin at the unit's first element, others at the first element that this rank keeps.
        base = 0 if self.unsharded else unit.layout.shard_range(unit.rank, unit.degrees.gradients)[0]
        return self.flat_grads[start - base : stop - base]
