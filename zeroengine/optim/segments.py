"""Which runs of a shard one kernel call may update: neighbours of one group and one step count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroengine.partition.layout import FlatLayout


@dataclass(frozen=True)
class Segment:
    """A run of elements of an optimizer shard."""

    start: int
    stop: int
    group: int  # index into param_groups
    step: int  # the step count of its parameters

    def at(self, last: int) -> Segment:
        """``step`` counted back from ``last``."""
        return replace(self, step=last - self.step)


def segments_of(
    layout: FlatLayout, rank: int, groups: Sequence[int], used: Sequence[bool], steps: Sequence[int]
) -> list[Segment]:
    """The segments of ``rank``'s optimizer shard.

    Padding between two parameters joins a segment when both sides do: it holds zeros and stays zero.

    Args:
        groups, used, steps: for each parameter of the layout its group, whether it takes part, its step count.
    """
    segments: list[Segment] = []
    joins = False  # whether nothing was left out since the last segment
    for span in layout.spans(rank, layout.degrees.optimizer):
        i, stop = span.param_index, span.shard_offset + span.numel
        if not used[i]:
            joins = False
            continue
        last = segments[-1] if segments else None
        if joins and last is not None and (last.group, last.step) == (groups[i], steps[i]):
            segments[-1] = replace(last, stop=stop)
        else:
            segments.append(Segment(span.shard_offset, stop, groups[i], steps[i]))
        joins = True
    return segments
