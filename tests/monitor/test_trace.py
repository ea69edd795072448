"""A timeline follows the Trace Event Format, has all ranks on one clock, and names units."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zeroengine
from tests.distributed.models import build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import take_steps
from zeroengine.monitor.timer import Interval
from zeroengine.monitor.trace import LANES, RankTimeline, write_trace

UNITS = {"rest", "blocks.0", "blocks.1", "blocks.2"}


def check_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events, which have all that the format asks for: see the source in ``monitor/trace.py``."""
    document = json.loads(path.read_text())
    assert set(document) == {"traceEvents", "displayTimeUnit"} and document["displayTimeUnit"] in ("ms", "ns")
    open_pairs: set[tuple[Any, ...]] = set()
    lanes: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            key = {"process_name": "name", "thread_name": "name"}.get(event["name"], "sort_index")
            assert set(event["args"]) == {key}
            continue
        assert isinstance(event["cat"], str) and event["ts"] >= 0
        pair = (event["pid"], event["cat"], event.get("id"), event["name"])
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "b":
            assert isinstance(event["id"], str) and pair not in open_pairs
            open_pairs.add(pair)
        else:
            assert event["ph"] == "e"
            open_pairs.remove(pair)
    assert not open_pairs
    for events in lanes.values():
        # Complete events of one lane may nest, and may not overlap otherwise.
        for before, after in itertools.pairwise(sorted(events, key=lambda event: event["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002
    return list(document["traceEvents"])


def trace(folder: Path, more: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    monitor = {"folder": str(folder)}
    engine = zeroengine.initialize(build(), None, config(3, monitor=monitor, trace={"steps": [2, 3]}, **more))
    take_steps(engine, range(4))
    engine.close()


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_timeline_has_all_lanes_of_all_ranks_named_by_unit(tmp_path: Path, on_disk: bool) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    more = {"zero_optimization": {"offload_optimizer": place}} if on_disk else {}
    run_ranks(2, trace, tmp_path / "run", more)
    events = check_trace(tmp_path / "run" / "trace-2.json")
    records = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    for rank in range(2):
        own = [event for event in events if event["pid"] == rank]
        names = {event["tid"]: event["args"]["name"] for event in own if event["name"] == "thread_name"}
        assert list(names.values()) == list(LANES)
        found = defaultdict(set)
        for event in own:
            if event["ph"] in "Xb":
                found[event["cat"]].add(event["name"])
                assert names[event["tid"]] in (event["cat"], "compute")
        for kind in ("forward", "backward", "gather", "reduce"):
            assert found[kind] >= UNITS, kind
        assert found["update"] and (found["disk"] == {"disk read", "disk write"}) == on_disk
        # The two steps and no other: the intervals are the time of the records, without what is outside the engine.
        times = [event["dur"] / 1e6 for event in own if event["ph"] == "X"]
        kinds = sum(sum(record["split"].values()) - record["split"]["other"] for record in records[1:3])
        assert sum(times) == pytest.approx(kinds, rel=0.5)
    starts = [min(e["ts"] for e in events if e["pid"] == rank and e["ph"] == "X") for rank in range(2)]
    # Both ranks begin the step after the same collective.
    assert abs(starts[0] - starts[1]) < 1e6


def test_the_clocks_of_ranks_are_shifted_onto_that_of_rank_0(tmp_path: Path) -> None:
    slots = [("other", ""), ("forward", "a")]
    timelines = [
        RankTimeline([Interval(1, begin, begin + 1.0)], [(True, 8, begin, begin + 2)]) for begin in (5.0, 95.0)
    ]
    assert write_trace(tmp_path / "trace.json", timelines, [0.0, -90.0], slots) == 4
    events = [event for event in check_trace(tmp_path / "trace.json") if event["ph"] in "Xb"]
    assert {(event["ts"], event["name"]) for event in events} == {(0.0, "a"), (0.0, "disk write")}
