"""The timer attributes every moment to one kind of work."""

from __future__ import annotations

import itertools
import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from zeroengine.monitor.timer import MAX_MARKS, DeviceClock, StepTimes, Timer, _MarkRecorder

UNITS = ["layers.0", "layers.1"]


def sleep(seconds: float = 0.02) -> None:
    time.sleep(seconds)


def seconds_by_name(timer: Timer, times: StepTimes) -> dict[tuple[str, str], float]:
    seconds, _ = times.wait()
    return {name: value for name, value in zip(timer.slot_names, seconds, strict=True) if value > 0.01}


def test_an_inner_span_takes_its_time_from_the_outer_one_and_all_add_up_to_the_wall() -> None:
    timer = Timer(UNITS, torch.device("cpu"))
    begin = time.perf_counter()
    with timer.span("forward"):
        sleep()
        with timer.span("gather", "layers.1"):
            sleep(0.04)
        sleep()
    sleep()
    times = timer.end_step()
    wall = time.perf_counter() - begin
    found = seconds_by_name(timer, times)
    assert set(found) == {("forward", ""), ("gather", "layers.1"), ("other", "")}
    assert 0.04 <= found["forward", ""] < 0.04 + wall - 0.1 and found["gather", "layers.1"] >= 0.04
    assert sum(times.wait()[0]) == pytest.approx(wall, rel=0.01)


def test_a_span_whose_end_an_error_skipped_ends_with_the_span_around_it() -> None:
    timer = Timer(UNITS, torch.device("cpu"))
    outer = timer.begin("forward")
    timer.begin("gather", "layers.0")
    timer.end(outer)
    sleep()
    timer.end(outer)
    assert set(seconds_by_name(timer, timer.end_step())) == {("other", "")}


def test_a_step_begins_with_the_spans_that_the_previous_one_left_open() -> None:
    timer = Timer(UNITS, torch.device("cpu"))
    span = timer.begin("checkpoint")
    first = timer.end_step()
    sleep()
    timer.end(span)
    second = timer.end_step()
    assert not seconds_by_name(timer, first) and set(seconds_by_name(timer, second)) == {("checkpoint", "")}


def test_an_evaluation_reaches_from_the_last_work_of_training_to_its_last_forward() -> None:
    timer = Timer(UNITS, torch.device("cpu"))
    timer.end_step()
    timer.trace(True)
    for _ in range(2):
        with timer.span("backward"):
            sleep()
        timer.note_training()
        sleep()
        with timer.span("checkpoint"):
            sleep()
        with timer.span("gather", "layers.0"):
            sleep()
        timer.note_evaluation()
        sleep()
        timer.note_evaluation()
        # The evaluation is over, and the loop loads its next batch.
        sleep()
        seconds, timeline = timer.end_step().wait()
        found = {timer.slot_names[slot][0]: value for slot, value in enumerate(seconds) if value > 0.01}
        in_timeline = dict.fromkeys(found, 0.0)
        for interval in timeline:
            if interval.end - interval.begin > 0.01:
                in_timeline[timer.slot_names[interval.slot][0]] += interval.end - interval.begin
        assert set(found) == {"backward", "checkpoint", "evaluation", "other"}
        assert found["evaluation"] >= 0.06 and in_timeline == pytest.approx(found, rel=0.1)


def test_a_timeline_covers_the_traced_steps_without_gaps_and_names_the_units_of_a_backward() -> None:
    timer = Timer(UNITS, torch.device("cpu"))
    timer.end_step()
    timer.trace(True)
    with timer.span("backward"):
        sleep()
        timer.name_backward("layers.1")
        with timer.span("reduce", "layers.1"):
            sleep()
        sleep()
        timer.name_backward("layers.0")
    first, timeline = timer.end_step().wait()
    timer.trace(False)
    assert all(before.end == after.begin for before, after in itertools.pairwise(timeline))
    long = [timer.slot_names[interval.slot] for interval in timeline if interval.end - interval.begin > 0.01]
    assert long == [("backward", "layers.1"), ("reduce", "layers.1"), ("backward", "layers.0")]
    assert sum(first) == pytest.approx(timeline[-1].end - timeline[0].begin)
    assert not timer.end_step().wait()[1]


def test_a_timer_that_is_off_returns_a_context_that_does_nothing() -> None:
    timer = Timer()
    assert not timer.enabled and isinstance(timer.span("gather", "layers.0", "gather"), nullcontext)
    timer.end(timer.begin("forward"))
    timer.count("gather", 5)
    assert timer.received["gather"] == 0


class LateEvent:
    """An event of a device that is 300 marks behind the host. A mark takes a millisecond."""

    num_records = 0
    num_made = 0
    first = 0

    def __init__(self, **_: bool) -> None:
        LateEvent.num_made += 1

    def record(self) -> None:
        LateEvent.num_records += 1
        self.number = LateEvent.num_records

    def query(self) -> bool:
        return self.number <= LateEvent.num_records - 300

    def synchronize(self) -> None:
        # The first event is made before the device has anything to do.
        assert self.query() or LateEvent.num_records in (1, 20_002), "the host waits in a step"

    def elapsed_time(self, later: LateEvent) -> float:
        return later.number - self.number


def test_a_step_of_many_micro_steps_keeps_few_marks_of_a_device_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    recorder = _MarkRecorder(2, DeviceClock())
    for number in range(20_000):
        recorder.mark(number % 2)
    assert len(recorder._marks) < 2 * MAX_MARKS and LateEvent.num_made < 2 * MAX_MARKS
    assert recorder.take().wait()[0] == pytest.approx([10.0, 10.0])


class OldEvent(LateEvent):
    """The first event is a day old, and times are float32 milliseconds, as in CUDA."""

    def synchronize(self) -> None:
        """Everything is complete."""

    def elapsed_time(self, later: LateEvent) -> float:
        milliseconds = 0.5 * (later.number - self.number)
        return float(np.float32(milliseconds + 86_400_000 * (self.number == OldEvent.first < later.number)))


def test_the_timeline_of_a_device_is_as_exact_after_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", OldEvent)
    OldEvent.first = LateEvent.num_records + 1
    recorder = _MarkRecorder(2, DeviceClock())
    recorder.mark(0)
    recorder.take().wait()
    recorder.trace(True)
    steps = []
    for _ in range(2):
        for _ in range(10):
            recorder.mark(1)
        steps.append(recorder.take())
    timeline = [interval for step in steps for interval in step.wait()[1]]
    assert [interval.end - interval.begin for interval in timeline] == pytest.approx([0.0005] * 20, abs=1e-6)
    assert all(before.end == after.begin for before, after in itertools.pairwise(timeline))
