"""Write the intervals of all ranks as a timeline in the Trace Event Format, for Perfetto and chrome://tracing.

Source: "Trace Event Format", Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zeroengine.monitor.timer import Interval
from zeroengine.utils.files import replace_file

# The lanes of a rank, and the kinds of work in each.
LANES = {
    "compute": ("forward", "backward"),
    "gather": ("gather",),
    "reduce": ("reduce",),
    "exchange": ("exchange",),
    "offload": ("offload",),
    "update": ("update",),
    "checkpoint": ("checkpoint",),
    "evaluation": ("evaluation",),
    "disk": (),
}
LANE_OF_KIND = {kind: number for number, kinds in enumerate(LANES.values()) for kind in kinds}
DISK_LANE = list(LANES).index("disk")
# Messages to each rank that its clock is compared by. The quickest counts.
NUM_PINGS = 8


class RankTimeline(NamedTuple):
    """What one rank did in the traced steps, on its own clock.

    Attributes:
        intervals: Kinds of work. They do not overlap.
        transfers: Reads and writes of a disk, which may overlap: whether it is a write, the bytes, begin and end.
    """

    intervals: Sequence[Interval]
    transfers: Sequence[tuple[bool, int, float, float]]


def measure_clock_offsets(group: dist.ProcessGroup) -> list[float]:
    """Return, on rank 0, what to add to each rank's ``perf_counter`` to get rank 0's. A collective of ``group``.

    Rank 0 sends a message to a rank, which replies with its time. If both directions take equally long, that is the
    time in the middle (Cristian, Probabilistic clock synchronization, 1989). The quickest reply has the smallest error.
    """
    offsets = [0.0]
    message = torch.zeros(1, dtype=torch.float64, device="cpu")
    for peer in range(1, group.size()):
        replies = []
        for _ in range(NUM_PINGS):
            if group.rank() == 0:
                sent = time.perf_counter()
                dist.send(message, group=group, group_dst=peer)
                dist.recv(message, group=group, group_src=peer)
                received = time.perf_counter()
                replies.append((received - sent, (sent + received) / 2 - message.item()))
            elif group.rank() == peer:
                dist.recv(message, group=group, group_src=0)
                message.fill_(time.perf_counter())
                dist.send(message, group=group, group_dst=0)
        if replies:
            offsets.append(min(replies)[1])
    return offsets


def write_trace(
    path: str | os.PathLike[str],
    timelines: Sequence[RankTimeline],
    offsets: Sequence[float],
    slot_names: Sequence[tuple[str, str]],
) -> int:
    """Write a timeline of all ranks, and return the number of intervals and transfers in it.

    Args:
        path: The file, which is replaced as a whole.
        timelines: The timeline of each rank.
        offsets: What to add to each rank's times, in seconds.
        slot_names: The kind and the unit of each slot.
    """
    starts = [line.intervals[0].begin + shift for line, shift in zip(timelines, offsets, strict=True) if line.intervals]
    origin = min(starts, default=0.0)
    names = [event for rank in range(len(timelines)) for event in _lanes(rank)]
    events: list[dict[str, Any]] = []
    for rank, (timeline, offset) in enumerate(zip(timelines, offsets, strict=True)):
        events += _intervals(rank, timeline.intervals, offset - origin, slot_names)
        events += _transfers(rank, timeline.transfers, offset - origin)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}, separators=(",", ":")))
    return sum(event["ph"] != "e" for event in events)


def _lanes(rank: int) -> Iterator[dict[str, Any]]:
    """Yield the names of a rank's lanes: a rank is a process, and a lane is one of its threads."""
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for number, lane in enumerate(LANES):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}


def _intervals(
    rank: int, intervals: Sequence[Interval], shift: float, slot_names: Sequence[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    for slot, begin, end in intervals:
        kind, unit = slot_names[slot]
        # Time outside of the engine is the gap between the others.
        if kind != "other" and end > begin:
            start, stop = _microseconds(begin + shift), _microseconds(end + shift)
            yield {
                "ph": "X",
                "name": unit or kind,
                "cat": kind,
                "ts": start,
                "dur": round(stop - start, 3),
                "pid": rank,
                "tid": LANE_OF_KIND[kind],
            }


def _transfers(
    rank: int, transfers: Sequence[tuple[bool, int, float, float]], shift: float
) -> Iterator[dict[str, Any]]:
    for number, (is_write, nbytes, begin, end) in enumerate(transfers):
        name = "disk write" if is_write else "disk read"
        # Transfers overlap, and events of one lane may not, so each is a pair of asynchronous events.
        same = {"name": name, "cat": "disk", "id": f"{rank}.{number}", "pid": rank, "tid": DISK_LANE}
        yield {"ph": "b", "ts": _microseconds(begin + shift), "args": {"bytes": nbytes}, **same}
        yield {"ph": "e", "ts": _microseconds(end + shift), **same}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
