"""What wall_clock_breakdown, memory_breakdown and timers.throughput print."""

from __future__ import annotations

import io
from typing import Any

import pytest

from tests.monitor.records import record
from zeroengine.config import load
from zeroengine.monitor.record import SPLIT
from zeroengine.monitor.sinks.step_printer import StepPrinter


def printed(num_steps: int, **settings: Any) -> list[str]:
    out = io.StringIO()
    printer = StepPrinter(load(settings), out)
    for step in range(1, num_steps + 1):
        # The second half of the steps takes twice the time.
        factor = 2 if step > num_steps / 2 else 1
        split = {kind: factor * seconds for kind, seconds in record(step).split.items()} | {"offload": 0.0}
        printer.step(record(step, seconds=sum(split.values()), split=split))
    printer.close()
    return out.getvalue().splitlines()


def test_the_split_adds_up_to_the_mean_step_and_leaves_out_what_does_not_happen() -> None:
    head, *rows, slowest = printed(4, wall_clock_breakdown=True, steps_per_print=4)
    seconds = [kind_seconds for kind, kind_seconds in record(1).split.items() if kind != "offload"]
    assert head == f"step 4: {1500 * sum(seconds):.1f} ms per step, mean over 4 steps"
    assert [row.split()[0] for row in rows] == [kind for kind in SPLIT if kind != "offload"]
    assert sum(float(row.split()[1]) for row in rows) == pytest.approx(1500 * sum(seconds), abs=0.5)
    assert sum(float(row.split()[3].rstrip("%")) for row in rows) == pytest.approx(100, abs=1)
    assert slowest == "  rank 1 computes 0.120 s longer than the median"


def test_without_steps_per_print_ten_steps_share_a_table() -> None:
    lines = printed(25, wall_clock_breakdown=True)
    assert [line.split(":")[0] for line in lines if line.startswith("step")] == ["step 10", "step 20"]


def test_the_throughput_is_that_of_the_whole_interval() -> None:
    (line,) = printed(4, timers={"throughput": {"enabled": True}}, steps_per_print=4)
    split = {kind: 1.5 * seconds for kind, seconds in record(1).split.items() if kind != "offload"}
    seconds = sum(split.values())
    training = seconds - split["checkpoint"] - split["evaluation"]
    assert line.startswith(f"step 4: loss 1.0000, {8 / training:,.1f} samples/s, {128 / training:,.1f} tokens/s, ")
    assert line.endswith(f"MFU 25.0%, {seconds:.4g} s per step")


def test_memory_has_a_column_for_each_kind_of_memory_that_holds_something() -> None:
    head, *rows = printed(10, memory_breakdown=True)
    assert head.split() == ["step", "10:", "memory", "device", "cpu"]
    assert [row.split() for row in rows] == [
        ["parameters", "1.0", "MiB", "0", "B"],
        ["master", "0", "B", "3.0", "MiB"],
        ["peak", "5.0", "MiB"],
    ]


def test_nothing_is_printed_unless_it_is_asked_for() -> None:
    assert not StepPrinter.is_asked_for(load({"steps_per_print": 5}))
    assert not StepPrinter.is_asked_for(load({"timers": {"throughput": {"enabled": False}}}))
