"""A sink that fails, hangs or is slow costs itself alone."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from tests.monitor.records import checkpoint_event, record
from zeroengine.monitor.record import RunEvent, StepRecord
from zeroengine.monitor.sink_threads import SinkThreads


class ListSink:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.events: list[str] = []
        self.is_closed = False

    def step(self, record: StepRecord) -> None:
        self.steps.append(record.step)

    def event(self, event: RunEvent) -> None:
        self.events.append(event.kind)

    def close(self) -> None:
        self.is_closed = True


class FailingSink(ListSink):
    """Fails at step 3, as where a disk is full."""

    def step(self, record: StepRecord) -> None:
        super().step(record)
        if record.step == 3:
            raise OSError(28, "No space left on device")


class BlockedSink(ListSink):
    """A server that does not answer until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def step(self, record: StepRecord) -> None:
        self.answers.wait()
        super().step(record)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


def test_every_sink_takes_all_records_in_order_and_is_closed() -> None:
    first, second = ListSink(), ListSink()
    sinks = SinkThreads({"first": lambda: first, "second": lambda: second})
    for step in range(1, 101):
        sinks.step(record(step))
    sinks.event(checkpoint_event(100))
    sinks.close()
    for sink in (first, second):
        assert sink.steps == list(range(1, 101)) and sink.events == ["checkpoint"] and sink.is_closed


def test_a_sink_that_fails_midway_is_closed_with_one_warning_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, healthy = FailingSink(), ListSink()
    sinks = SinkThreads({"csv_monitor": lambda: failing, "folder": lambda: healthy})
    for step in range(1, 11):
        sinks.step(record(step))
    sinks.close()
    assert failing.steps == [1, 2, 3] and failing.is_closed
    assert healthy.steps == list(range(1, 11))
    assert len(warnings(caplog)) == 1
    assert "csv_monitor failed, and training goes on without it: [Errno 28] No space left" in warnings(caplog)[0]


def test_a_sink_that_cannot_be_opened_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    healthy = ListSink()

    def refuse() -> ListSink:
        raise ConnectionError("no server at 127.0.0.1:5000")

    sinks = SinkThreads({"comet": refuse, "folder": lambda: healthy})
    for step in range(1, 4):
        sinks.step(record(step))
    sinks.close()
    assert healthy.steps == [1, 2, 3]
    assert len(warnings(caplog)) == 1 and "comet failed" in warnings(caplog)[0]


def test_nothing_waits_for_a_sink_that_hangs_and_its_oldest_records_are_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocked, healthy = BlockedSink(), ListSink()
    sinks = SinkThreads({"wandb": lambda: blocked, "folder": lambda: healthy}, capacity=10)
    begin = time.monotonic()
    for step in range(1, 101):
        sinks.step(record(step))
        # Otherwise the healthy sink, too, would be outrun.
        while not healthy.steps or healthy.steps[-1] < step:
            assert time.monotonic() - begin < 60
            time.sleep(0.001)
    assert blocked.steps == []
    blocked.answers.set()
    sinks.close()
    assert healthy.steps == list(range(1, 101))
    # The one that it was busy with, if it had begun by then, and the newest ten.
    assert blocked.steps[-10:] == list(range(91, 101)) and len(blocked.steps) <= 11
    first, second = warnings(caplog)
    assert "wandb does not keep up: the oldest of 10 records" in first
    assert f"wandb lacks {100 - len(blocked.steps)} records" in second


def test_the_end_waits_for_a_sink_that_hangs_no_longer_than_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    blocked = BlockedSink()
    sinks = SinkThreads({"comet": lambda: blocked})
    sinks.step(record(1))
    begin = time.monotonic()
    sinks.close(timeout_seconds=0.1)
    assert time.monotonic() - begin < 10
    assert "comet has not taken" in warnings(caplog)[0]
    blocked.answers.set()
