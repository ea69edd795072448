"""The gradients of one unit on one rank: memory and bookkeeping, no communication."""

from __future__ import annotations

import torch

from zeroengine import ops
from zeroengine.comm.interfaces import ChannelName, Transport
from zeroengine.offload.disk_store import OffloadStore
from zeroengine.offload.placement import can_offload_gradients
from zeroengine.runtime.unit import Unit


class UnitGradients:
    """The gradients of one unit: what this rank keeps, and how far the present micro-step is.

    Args:
        dtype: of what is kept, in which gradients accumulate.
        reduce_dtype: in which they are reduced; None: as they are sent without a cast.
        store: where what is kept lives, if not on the device. Only of gradients that need not be kept whole.
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
        self.reduced_in_place = self.unsharded and dtype is self.reduce_dtype  # else they are sent from a slot
        self.channel: ChannelName | None = None  # that moves what is kept, without a cast
        numel = layout.shard_numel(degrees.gradients)
        if self.store is not None:
            self.grad_shard = self.store.empty(numel, dtype)
        elif dtype is self.reduce_dtype:
            self.channel = "reduce"
            self.grad_shard = transport.empty(numel, dtype, self.channel, sent=self.unsharded)
        else:
            self.grad_shard = torch.empty(numel, dtype=dtype, device=unit.full_buffer.device)
        self.param_views = views_of(unit, self.grad_shard) if self.unsharded else []
        if self.store is None:
            ops.advise_huge_pages(self.grad_shard)
            self.grad_shard.zero_()
        self.squared_norm: torch.Tensor | None = None  # of what is kept, where it was known before it left
        self.no_sync_grads: dict[int, torch.Tensor] = {}  # sums of earlier micro-steps in no_sync, by parameter
        self.expected = [1] * len(unit.params)  # gradients of each parameter in a backward, as in the last one
        self.arrived = [0] * len(unit.params)  # and in this one
        self.num_pending = 0  # parameters of which fewer have arrived than expected
        self.reduce_launched = False  # in this backward
        self.bucket_filled = [False] * len(unit.params)  # in this micro-step (bucket) or since the step (whole)
        self.has_grad = [False] * len(unit.params)  # since the step, on this rank
        self.is_reduced = False  # since the step

    def begin_backward(self) -> None:
        """Expect gradients anew."""
        self.arrived = [0] * len(self.expected)
        self.num_pending = len(self.expected)
        self.reduce_launched = False

    def count_arrival(self, index: int) -> None:
        """Count one more gradient of parameter ``index`` in this backward."""
        self.arrived[index] += 1
        if self.arrived[index] == self.expected[index]:
            self.num_pending -= 1

    def end_backward(self) -> None:
        """Expect of the next backward what came in this one."""
        self.expected = [max(1, count) for count in self.arrived]
        self.num_pending = 0

    def shard_of_degree(self, degree: int) -> torch.Tensor:
        """This rank's part at ``degree`` of the summed gradients, 1-D."""
        unit = self.unit
        start, stop = unit.layout.shard_range(unit.rank, degree)
        base = 0 if self.unsharded else unit.layout.shard_range(unit.rank, unit.degrees.gradients)[0]
        return self.grad_shard[start - base : stop - base]


def views_of(unit: Unit, flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[slot.offset : slot.end].view(slot.shape) for slot in unit.layout.slots]
