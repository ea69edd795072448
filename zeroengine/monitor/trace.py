"""Write the intervals of all ranks as a timeline in the Trace Event Format, for Perfetto and chrome://tracing.

Source: "Trace Event Format", Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroengine.monitor.timer import Interval

# The lanes of a rank, and the kinds of work in each.
LANES = {
    "compute": ("forward", "backward"),
    "gather": ("gather",),
    "reduce": ("reduce",),
    "offload": ("offload",),
    "update": ("update",),
    "checkpoint": ("checkpoint",),
}
LANE_OF_KIND = {kind: number for number, kinds in enumerate(LANES.values()) for kind in kinds}
# Messages to each rank that its clock is compared by. The quickest counts.
NUM_PINGS = 8


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
    timelines: Sequence[Sequence[Interval]],
    offsets: Sequence[float],
    slot_names: Sequence[tuple[str, str]],
) -> int:
    """Write a timeline of all ranks, and return the number of its intervals.

    Args:
        path: The file, which is replaced as a whole.
        timelines: The intervals of each rank.
        offsets: What to add to each rank's times, in seconds.
        slot_names: The kind and the unit of each slot.
    """
    starts = [line[0].begin + offset for line, offset in zip(timelines, offsets, strict=True) if line]
    origin = min(starts, default=0.0)
    events = [event for rank in range(len(timelines)) for event in _lanes(rank)]
    num_named = len(events)
    for rank, (timeline, offset) in enumerate(zip(timelines, offsets, strict=True)):
        events += _events(rank, timeline, offset - origin, slot_names)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")))
    partial.replace(target)
    return len(events) - num_named


def _lanes(rank: int) -> Iterator[dict[str, Any]]:
    """Yield the names of a rank's lanes: a rank is a process, and a lane is one of its threads."""
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for number, lane in enumerate(LANES):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}


def _events(
    rank: int, timeline: Sequence[Interval], shift: float, slot_names: Sequence[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    for slot, begin, end in timeline:
        kind, unit = slot_names[slot]
        # Time outside of the engine is the gap between the others.
        if kind == "other" or end <= begin:
            continue
        yield {
            "ph": "X",
            "name": unit or kind,
            "cat": kind,
            "ts": round((begin + shift) * 1e6, 3),
            "dur": round((end - begin) * 1e6, 3),
            "pid": rank,
            "tid": LANE_OF_KIND[kind],
        }
