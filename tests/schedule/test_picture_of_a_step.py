"""The pictures of a step are drawn from the recorded one, whose events and actions are those of this version."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.emulated import cpu_alone
from tests.schedule.picture_of_a_step import PICTURES, RECORD, Step, draw, order_of, step_of
from tests.schedule.recorded_step import Record, record_step

AGAIN = "run python -m tests.schedule.picture_of_a_step"


@pytest.fixture(scope="module")
def record() -> Record:
    recorded: Record = json.loads(RECORD.read_text())
    return recorded


@pytest.fixture(scope="module")
def step(record: Record) -> Step:
    return step_of(record)


def test_the_pictures_are_those_of_the_recorded_step(record: Record, tmp_path: Path) -> None:
    draw(record, tmp_path)
    for path in tmp_path.iterdir():
        ElementTree.fromstring(path.read_text())
        assert path.read_text() == (PICTURES / path.name).read_text(), f"{AGAIN} --redraw"
        assert path.stat().st_size < 100_000


@cpu_alone("what is recorded is Gloo between processes that compute on CPUs")
def test_a_step_has_the_events_and_actions_of_the_recorded_one(record: Record) -> None:
    assert order_of(record_step(width=32, num_tokens=8, num_steps=1)) == order_of(record), AGAIN


def test_units_are_gathered_ahead_of_their_use_and_released_after_it(step: Step) -> None:
    arrival_of = {arrival.unit: arrival.end for arrival in reversed(step.arrivals)}
    # The first unit of a pass has none before it.
    assert all(arrival_of[forward.unit] <= forward.begin for forward in step.forwards)
    for residence in step.residences:
        others = [other for other in step.residences if other.begin <= residence.begin < other.end]
        assert len(others) <= 2


def test_units_are_reduced_in_reverse_order_while_the_backward_goes_on(step: Step) -> None:
    units = [reduce.unit for reduce in step.reduces]
    assert units == list(reversed(range(len(step.units))))
    end = step.backwards[-1].end
    assert all(reduce.begin < end for reduce in step.reduces[:-1])
