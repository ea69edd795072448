"""Which tensors have changed since an earlier stream, by digests of shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zeroengine import ops
from zeroengine.comm.group import Group
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.placement import Placement
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.unit import Unit
from zeroengine.weights.selection import Converted, OutgoingTensor, Slot, StoredValue, values_of


@dataclass(frozen=True)
class WeightsToken:
    """What a consumer of streams has. `WeightsToken()` stands for one that has nothing yet.

    Attributes:
        digests: By tensor, its dtype in the stream, how it is converted, and the digests of what its values come from.
        number: How many streams the consumer has taken.
        gatherer: Tells engines apart. None: any engine.
    """

    digests: Mapping[str, tuple[object, ...]] = field(default_factory=dict, repr=False)
    number: int = 0
    gatherer: weakref.ref[Gatherer] | None = field(default=None, repr=False)

    def check_belongs_to(self, gatherer: Gatherer) -> None:
        """Check that streams of this engine gave the token.

        Raises:
            ZeroEngineError: It comes from another engine.
        """
        if self.gatherer is not None and self.gatherer() is not gatherer:
            raise ZeroEngineError(
                "stream_weights(): since is the token of another engine, or from before engine.change(), and says "
                "nothing about these values. Begin with since=zeroengine.WeightsToken()"
            )

    def next(self, digests: Mapping[str, tuple[object, ...]], gatherer: Gatherer) -> WeightsToken:
        """Return the token of a consumer that has also taken tensors with these digests."""
        return WeightsToken({**self.digests, **digests}, self.number + 1, weakref.ref(gatherer))


def digests_of(
    tensors: Sequence[OutgoingTensor],
    stored: Mapping[str, StoredValue],
    group: Group,
    data_group: Callable[[Unit], Group],
    slice_number: Callable[[Unit], int],
    placement: Placement,
) -> dict[str, tuple[object, ...]]:
    """Return the dtype of each tensor, and the digests of what its values come from, by name. A collective.

    Every rank reads a part of each parameter, and one sum adds the digests of the parts, and those of all replicas and
    of what each rank has for itself. So all ranks see the same changes, whoever gets the values.

    Args:
        tensors: The tensors.
        stored: What conversions take, by name.
        group: All ranks.
        data_group: Returns the ranks that a unit is partitioned over.
        slice_number: Returns the number of this rank's slices of a unit; 0 if it is not split.
        placement: The states that live in CPU memory or on a disk.
    """
    sources = {tensor.name: values_of(tensor.source, stored) for tensor in tensors}
    numbers = {source: i for i, source in enumerate({source: None for own in sources.values() for source in own})}
    sums = torch.zeros(len(numbers), dtype=torch.int64, device=group.device)
    for unit in dict.fromkeys(source.unit for source in numbers if isinstance(source, Slot)):
        own_range = unit.layout.unreplicated_range(unit.rank, unit.degrees.parameters, data_group(unit).world_size)
        for span in unit.layout.spans(unit.rank, unit.degrees.parameters, own_range):
            if (number := numbers.get(Slot(unit, span.param_index))) is not None:
                values = unit.shard[span.shard_slice]
                populate(values)
                # The odd factor shows values that have moved from one slice to another.
                sums[number] = ops.digest(values, span.param_offset) * (2 * slice_number(unit) + 1)
        placement.evict(unit.shard)
    for source, number in numbers.items():
        if not isinstance(source, Slot):
            sums[number] = ops.digest(source.value)
    # The digests add up modulo 2**64.
    group.all_reduce(sums, "of digests of weights")
    digests = dict(zip(numbers, sums.tolist(), strict=True))
    settings = {t.name: t.source.group.settings if isinstance(t.source, Converted) else "" for t in tensors}
    return {t.name: (str(t.spec.dtype), settings[t.name], *(digests[s] for s in sources[t.name])) for t in tensors}
