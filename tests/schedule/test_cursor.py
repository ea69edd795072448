"""A backward that comes to some visits of a log gathers all of them, in one order, and says when units are over."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from zeroengine.schedule.cursor import Cursor
from zeroengine.schedule.visits import EARLIEST, Place, Visit, VisitLog

UNITS = range(4)


def pass_over(cursor: Cursor, place: Place) -> list[Visit]:
    passed = []
    for visit in cursor.passed_over(place):
        assert cursor.needs_next(visit.units[0])
        cursor.drop(visit)
        passed.append(visit)
    return passed


def log_of(units: Sequence[int], sizes: Sequence[int]) -> VisitLog:
    """A log of one visit after another, each of one unit and of some nodes; a skipped item makes none."""
    log, node = VisitLog(), 0
    for unit, size in zip(units, sizes, strict=True):
        visit = Visit([unit], node)
        node += size
        log.set_place(visit, node - 1)
        log.add([visit], 0)
    return log


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[int], list[int], list[bool]]:
    """The unit of each visit, its nodes, and whether autograd comes to it."""
    units = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
    sizes = [draw(st.integers(0, 3)) for _ in units]
    reached = [size > 0 and draw(st.booleans()) for size in sizes]
    return units, sizes, reached


@given(logs())
def test_every_visit_comes_once_in_reverse_order_whatever_autograd_comes_to(
    drawn: tuple[list[int], list[int], list[bool]],
) -> None:
    units, sizes, reached = drawn
    log = log_of(units, sizes)
    cursor = Cursor([log])
    order: list[Visit] = []
    left: list[Visit] = []
    for visit in [visit for visit, is_reached in zip(log.visits, reached, strict=True) if is_reached][::-1]:
        order += pass_over(cursor, visit.place)
        left += cursor.leave(visit.place.node_number)
        cursor.reach(visit)
        order.append(visit)
        # Units of the visits that are to come, and of this one, are in use.
        first = log.visits.index(visit)
        assert all(cursor.is_pending(unit) for unit in units[:first])
        assert not any(cursor.is_over(unit) for unit in units[: first + 1])
    order += pass_over(cursor, EARLIEST)
    left += cursor.leave(-1)
    assert order == log.visits[::-1]
    assert left == [visit for visit in order if reached[log.visits.index(visit)]]
    assert all(cursor.is_over(unit) and not cursor.is_pending(unit) for unit in UNITS)


def test_a_visit_is_over_when_autograd_comes_to_what_was_made_before_it() -> None:
    log = log_of([0, 1], [3, 3])
    cursor = Cursor([log])
    cursor.reach(log.visits[1])
    assert cursor.leave(3) == []
    assert cursor.leave(2) == [log.visits[1]]


def test_what_a_log_does_not_track_and_logs_that_may_be_part_of_a_backward_are_never_over() -> None:
    tracked, unknown = log_of([0], [1]), log_of([1], [1])
    tracked.untracked.add(2)
    cursor = Cursor([tracked], [unknown])
    pass_over(cursor, EARLIEST)
    assert [cursor.is_over(unit) for unit in UNITS] == [True, False, False, True]
    cursor.join(unknown)
    assert cursor.is_pending(1)
    assert pass_over(cursor, EARLIEST) == unknown.visits
    assert cursor.is_over(1)


def test_nothing_of_a_log_without_one_order_is_passed_over() -> None:
    log = log_of([0, 1], [1, 1])
    log.has_one_order = False
    cursor = Cursor([log])
    cursor.reach(log.visits[0])
    assert not pass_over(cursor, EARLIEST)
    assert not cursor.is_over(1)
