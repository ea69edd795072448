"""Runs of a shard that one kernel call can update: neighbors with the same param group and step count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroengine.partition.layout import FlatLayout


@dataclass(frozen=True)
class Segment:
    """A run of elements of an optimizer shard.

    Attributes:
        start: The first element within the shard.
        stop: The end of the run within the shard.
        group: The index into ``param_groups``.
        steps_behind: The steps by which the run's parameters are behind the unit's largest step count.
    """

    start: int
    stop: int
    group: int
    steps_behind: int


def segments_of(
    layout: FlatLayout, rank: int, groups: Sequence[int], has_grad: Sequence[bool], steps_behind: Sequence[int]
) -> list[Segment]:
    """Return the segments of ``rank``'s optimizer shard.

    Padding between two parameters belongs to a segment if both sides do: it holds zeros, and an update keeps them.

    Args:
        layout: The flat layout of the unit.
        rank: The rank whose shard it is.
        groups: For each parameter of the layout, the index of its group.
        has_grad: For each parameter, whether it has a gradient and is updated.
        steps_behind: For each parameter, the steps by which it is behind the unit's largest step count.
    """
    segments: list[Segment] = []
    # Whether the next parameter may join the last segment. A segment must not include a parameter without a gradient
    # between two parameters with one.
    joins = False
    for span in layout.spans(rank, layout.degrees.optimizer):
        i, stop = span.param_index, span.shard_offset + span.numel
        if not has_grad[i]:
            joins = False
            continue
        # The segment then includes the padding between the two parameters.
        last = segments[-1] if segments else None
        if joins and last is not None and (last.group, last.steps_behind) == (groups[i], steps_behind[i]):
            segments[-1] = replace(last, stop=stop)
        else:
            segments.append(Segment(span.shard_offset, stop, groups[i], steps_behind[i]))
        joins = True
    return segments
