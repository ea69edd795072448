"""Runs of a shard that one kernel call can update: neighbors with the same param group and step count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from zeroengine.partition.layout import FlatLayout, ShardSpan


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

    def update_of(span: ShardSpan) -> tuple[bool, int, int]:
        i = span.param_index
        return has_grad[i], groups[i], steps_behind[i]

    # A parameter without a gradient ends a segment, even between two parameters that are updated alike.
    for (is_updated, group, behind), run in groupby(layout.spans(rank, layout.degrees.optimizer), update_of):
        if is_updated:
            spans = list(run)
            segments.append(Segment(spans[0].shard_offset, spans[-1].shard_offset + spans[-1].numel, group, behind))
    return segments


def chunks_of(segments: Sequence[Segment], numel: int, size: int) -> Iterator[tuple[int, int, list[Segment]]]:
    """Yield the chunks of a shard that have a part of a segment.

    Args:
        segments: The segments of the shard.
        numel: The elements of the shard.
        size: The most elements of a chunk.

    Yields:
        The first element of a chunk, its end, and the segments that have a part of it. A segment may lie in several.
    """
    for start in range(0, numel, size):
        stop = min(start + size, numel)
        if inside := [segment for segment in segments if segment.start < stop and start < segment.stop]:
            yield start, stop, inside
