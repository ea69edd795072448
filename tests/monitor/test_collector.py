"""The end of a run is bounded and keeps what it can, whatever the other ranks do."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from zeroengine.monitor.collector import Collector, RankStep
from zeroengine.monitor.record import RunEvent, StepRecord
from zeroengine.monitor.timer import Timer

UNITS = ["layers.0"]


class Memory:
    """A sink that keeps what it takes."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def step(self, record: StepRecord) -> None:
        self.items.append(record.step)

    def event(self, event: RunEvent) -> None:
        self.items.append(event.kind)

    def close(self) -> None:
        self.items.append("closed")


def test_events_behind_a_step_that_waits_for_another_rank_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    other_rank = threading.Event()
    sink = Memory()
    collector = Collector(None, 0, UNITS, Timer(UNITS).slot_names, None, sink)
    gather = collector._gather

    def late(row: Any) -> Any:
        other_rank.wait()
        return gather(row)

    monkeypatch.setattr(collector, "_gather", late)
    times = Timer(UNITS, torch.device("cpu")).end_step()
    collector.put(RankStep(1, 0.0, times, {}, None, [0.1], 1.0, lambda: 1.0, lambda: False, {}))
    collector.begin_step()
    collector.put(RunEvent(0.0, 1, "checkpoint", "saved"))
    assert not collector.close(None, 0.2)
    assert sink.items == ["checkpoint", "end", "closed"]
    # The thread ends where the other rank comes after all.
    other_rank.set()
    collector._thread.join(10)
    assert not collector._thread.is_alive()


def test_an_engine_that_is_deleted_on_the_thread_of_the_monitor_ends_its_run(caplog: pytest.LogCaptureFixture) -> None:
    sink = Memory()
    collector = Collector(None, 0, UNITS, Timer(UNITS).slot_names, None, sink)

    def norm() -> float:
        collector.close_at_exit()
        return 1.0

    times = Timer(UNITS, torch.device("cpu")).end_step()
    collector.put(RankStep(1, 0.0, times, {}, None, [0.1], 1.0, norm, lambda: False, {}))
    collector.begin_step()
    collector._thread.join(10)
    deadline = time.monotonic() + 10
    while "closed" not in sink.items and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sink.items == [1, "end", "closed"] and not caplog.records
