"""Memory for buckets on their way. It is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zeroengine.comm.interfaces import Transport
from zeroengine.partition.layout import FlatLayout
from zeroengine.runtime.unit_gradients import UnitGradients, views_of
from zeroengine.utils.work import Work

PATIENCE_S = 1.0


@dataclass(frozen=True)
class BucketLayout:
    """Which elements of a bucket are padding. Two units whose layouts are equal may use one bucket in turn.

    ``numel`` counts although it follows from the parameters for one dtype: a unit of another dtype pads its shards to
    another length (``Transport.shard_align``), so equal parameters leave different padding at the end.
    """

    numel: int  # of the flat buffer, padding included
    params: tuple[tuple[int, tuple[int, ...]], ...]  # offset and shape

    @classmethod
    def of(cls, layout: FlatLayout) -> BucketLayout:
        """Return the bucket layout of a unit."""
        return cls(layout.numel, tuple((slot.offset, slot.shape) for slot in layout.slots))


@dataclass(eq=False)
class Slot:
    """Memory for one bucket on its way.

    Its padding is zero for units of ``layout``: it was zeroed when that layout came, gradients are written into
    ``views`` alone, and the ranks' paddings sum to zero. The norm counts on it, as it reads padding, too.
    """

    memory: torch.Tensor
    layout: BucketLayout | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    sent: Work | None = None  # the channel's operation that reads the memory
    work: Work | None = None  # done when this rank needs the memory no more: ``sent``, or what comes behind it
    busy: bool = False
    launched: int = 0  # the how-manieth bucket it last was


class Slots:
    """All of one rank's.

    Args:
        gradients: whose buckets they are for.
    """

    def __init__(self, transport: Transport, gradients: Sequence[UnitGradients]) -> None:
        self._transport = transport
        self._largest = max((grads.unit.layout.numel for grads in gradients), default=0)
        self._slots: list[Slot] = []
        self._num_sent = 0

    @property
    def nbytes(self) -> int:
        return sum(slot.memory.nbytes for slot in self._slots)

    def sent(self, slot: Slot) -> None:
        """It is on its way: free once its work is through."""
        slot.busy = False
        self._num_sent += 1
        slot.launched = self._num_sent

    def take(self, grads: UnitGradients) -> Slot:
        """Memory for one unit's gradients: a free slot, else one on its way, else a new one."""
        unit = grads.unit
        # A large unit takes a slot that fits any unit, a small one a slot of its own size.
        need = self._largest if 4 * unit.layout.numel > self._largest else unit.layout.numel
        fitting = [
            s for s in self._slots if s.memory.numel() == need and s.memory.dtype == grads.reduce_dtype and not s.busy
        ]
        fitting.sort(key=lambda s: s.launched)
        chosen = next((s for s in fitting if self._reusable(s, 0.0)), None)
        if chosen is None and len(fitting) >= 2:
            # A peer may read this slot only after its backward, which may need our next gather: do not insist.
            chosen = fitting[0] if self._reusable(fitting[0], PATIENCE_S) else None
        if chosen is None:
            chosen = Slot(self._transport.empty(need, grads.reduce_dtype, "reduce"))
            self._slots.append(chosen)
        layout = BucketLayout.of(unit.layout)
        if chosen.layout != layout:
            chosen.memory[: unit.layout.numel].zero_()
            chosen.layout, chosen.views = layout, views_of(unit, chosen.memory)
        chosen.busy = True
        return chosen

    def _reusable(self, slot: Slot, patience: float) -> bool:
        if slot.work is None or slot.sent is None:
            return True
        if slot.work is not slot.sent:
            if not patience and not slot.work.done():
                return False
            slot.work.wait_stream()  # nothing is ever gathered at degree 1, so no peer waits for this rank meanwhile
        return self._transport.reduce.reusable(slot.sent, patience)
