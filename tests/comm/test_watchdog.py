"""Where the ranks are, in one sentence; and which operation of a device has stalled, when nobody waits for it."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from zeroengine.comm.alarm_board import AlarmBoard, RankPosition, describe_positions
from zeroengine.comm.watchdog import POLL_INTERVAL_S, RAISE_TIMEOUT_S, Watchdog
from zeroengine.errors import DivergenceError

GATHER, REDUCE = "gather blocks.4", "reduce blocks.7"
HOSTS = ["node-a", "node-a", "node-b", "node-b"]


@pytest.mark.parametrize(
    ("places", "hosts", "sentence"),
    [
        (
            [RankPosition(True, REDUCE)] * 3 + [RankPosition(False, GATHER)],
            HOSTS,
            "rank 3 (node-b) is at gather blocks.4, the others wait at reduce blocks.7",
        ),
        (
            [RankPosition(True, REDUCE), None, RankPosition(True, REDUCE), RankPosition(True, REDUCE)],
            HOSTS,
            "rank 1 (node-a) does not answer (ended?), the others wait at reduce blocks.7",
        ),
        (
            [RankPosition(False, GATHER)] * 2 + [RankPosition(True, REDUCE)] * 2,
            HOSTS,
            "ranks 0, 1 (node-a) are at gather blocks.4, the others wait at reduce blocks.7",
        ),
        (
            [RankPosition(False, GATHER), RankPosition(True, REDUCE)],
            ["", ""],
            "rank 0 is at gather blocks.4, rank 1 waits at reduce blocks.7",
        ),
        ([RankPosition(True, GATHER)] * 4, HOSTS, "ranks 0, 1 (node-a) and 2, 3 (node-b) wait at gather blocks.4"),
        (
            [None, None, RankPosition(True, GATHER)],
            ["", "", ""],
            "ranks 0, 1 do not answer (ended?), rank 2 waits at gather blocks.4",
        ),
    ],
)
def test_the_smallest_group_of_ranks_is_named_first_and_the_rest_are_the_others(
    places: list[RankPosition | None], hosts: list[str], sentence: str
) -> None:
    described, _, advice = describe_positions(dict(enumerate(places)), hosts).partition(". Every rank must make")
    assert described == sentence and bool(advice) == (len(set(places)) > 1)


def test_ranks_that_wait_for_different_units_are_told_about_units() -> None:
    """Only where all wait: a rank that is elsewhere may be the cause, and its peers may wait at different units."""
    waits, other = RankPosition(True, GATHER), RankPosition(True, "gather blocks.5")
    assert '"units": ["layers.*"]' in describe_positions({0: waits, 1: other}, ["", ""])
    for third in (None, RankPosition(False, GATHER), RankPosition(True, REDUCE)):
        assert "units" not in describe_positions({0: waits, 1: other, 2: third}, ["", "", ""])


def test_ranks_that_have_begun_more_forwards_are_named_before_the_advice() -> None:
    places = {0: RankPosition(True, GATHER, 1, 4), 1: RankPosition(True, "gather blocks.5", 0, 4)}
    assert "blocks.5. Rank 0 began 1 more forward without gradients than rank 1. A forward" in describe_positions(
        places, ["", ""]
    )
    places = {rank: RankPosition(rank == 0, GATHER, 2, 5 - min(rank, 2)) for rank in range(4)}
    assert "Rank 0 began 2 more forwards with gradients than ranks 2, 3. Every rank must make" in describe_positions(
        places, [""] * 4
    )


# -- alarms -------------------------------------------------------------------------------------------


def test_an_answer_that_a_rank_gave_before_it_ended_still_counts() -> None:
    """Two find out that they wait for each other: one is told, and ends, before the other asks."""
    store = dist.HashStore()
    first, second = (AlarmBoard(store, rank, ["", ""]) for rank in range(2))
    places = [RankPosition(True, GATHER), RankPosition(True, REDUCE)]
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(first.ask, places[0])
        while not found.done():
            second.answer(lambda: places[1])
    assert found.result() == dict(enumerate(places))
    assert second.ask(places[1], 0.5) == dict(enumerate(places))
    assert second.ask(places[1], 0.5, again=True) == {0: None, 1: places[1]}
    assert second.ask(places[1], 0.5) == {0: None, 1: places[1]}, "it did not answer the alarm before this one"


class CountingStore:
    """Counts the requests to a store."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


def ask_all(boards: list[AlarmBoard], patience: float) -> list[Any]:
    """What each learns where all but the last ask at the same time."""
    with ThreadPoolExecutor(len(boards)) as threads:
        asked = [threads.submit(board.ask, RankPosition(True, GATHER), patience) for board in boards[:-1]]
        while not all(question.done() for question in asked):
            boards[-1].answer(lambda: RankPosition(False, REDUCE))
            time.sleep(0.05)
    return [question.result() for question in asked]


def test_a_rank_whose_wait_has_ended_is_reported_as_past_it() -> None:
    store = dist.HashStore()
    watchdog, other = Watchdog(store, 0, ["", ""], 60.0), AlarmBoard(store, 1, ["", ""])
    watchdog.record(GATHER)
    with watchdog.guard(REDUCE):
        pass
    with pytest.raises(MemoryError), watchdog.long_wait("save a checkpoint"):
        raise MemoryError
    place = RankPosition(True, REDUCE)
    assert other.ask(place, 10.0) == {0: RankPosition(False, GATHER), 1: place}
    watchdog.close()


def test_a_report_to_all_ranks_takes_a_few_requests_of_each() -> None:
    store, ranks = CountingStore(dist.HashStore()), 48
    boards = [AlarmBoard(store, rank, [""] * ranks) for rank in range(ranks)]  # type: ignore[arg-type]
    found = ask_all(boards, 10.0)
    everywhere = dict.fromkeys(range(ranks - 1), RankPosition(True, GATHER)) | {ranks - 1: RankPosition(False, REDUCE)}
    assert found == [everywhere] * (ranks - 1)
    assert store.requests < 10 * ranks


def test_a_report_does_not_end_with_the_rank_that_was_to_write_it() -> None:
    store = dist.HashStore()
    store.add("reader/1", 1)  # rank 0 has begun to, and ended
    boards = [AlarmBoard(store, rank, [""] * 4) for rank in range(1, 4)]
    everywhere = {0: None, 1: RankPosition(True, GATHER), 2: RankPosition(True, GATHER), 3: RankPosition(False, REDUCE)}
    assert ask_all(boards, 0.5) == [everywhere] * 2


# -- operations that nobody waits for -----------------------------------------------------------------

SHORT = 1.0  # seconds: comm.timeout_seconds


class OnDevice:
    """An operation that is through from the start, or after some seconds, or never."""

    def __init__(self, completed: bool = False, seconds: float = math.inf) -> None:
        self.done_at = 0.0 if completed else time.monotonic() + seconds
        self.asked = 0

    def wait_stream(self) -> None: ...

    def wait_host(self) -> None: ...

    def done(self) -> bool:
        self.asked += 1
        return time.monotonic() >= self.done_at


def alone(timeout: float = SHORT) -> Watchdog:
    return Watchdog(dist.HashStore(), 0, ["node-a"], timeout)


def test_an_operation_after_a_stalled_one_raises_the_stall() -> None:
    watchdog = alone()
    for number, completed in enumerate((True, False, True, False)):
        watchdog.issue(f"gather blocks.{number}", lambda: OnDevice(completed))  # noqa: B023
    began = time.monotonic()
    while time.monotonic() - began < 60:
        time.sleep(0.1)
        try:
            watchdog.issue("reduce blocks.3", OnDevice)
        except DivergenceError as error:
            assert str(error) == (
                "rank 0 has waited 1 s (comm.timeout_seconds) for gather blocks.1: rank 0 (node-a) waits at gather "
                "blocks.1."
            )
            break
    else:
        raise AssertionError("nobody noticed")
    assert time.monotonic() - began > 0.9 * SHORT
    watchdog.close()


def test_operations_done_in_time_or_never_issued_do_not_stall() -> None:
    watchdog, works = alone(), []
    with pytest.raises(MemoryError):
        watchdog.issue("gather blocks.0", lambda: exec("raise MemoryError"))
    for _ in range(20):
        # The clock ends it: on a busy machine this thread may sleep for longer than the timeout.
        works.append(watchdog.issue("gather blocks.0", lambda: OnDevice(seconds=0.1 * SHORT)))
        time.sleep(0.15 * SHORT)
    assert watchdog.issue("gather blocks.1", OnDevice) is not works[-1]
    watchdog.close()


def test_the_watchdog_asks_no_device_before_the_timeout() -> None:
    """Whose other threads may be capturing a graph."""
    watchdog, work = alone(timeout=60.0), OnDevice()
    watchdog.issue("gather blocks.0", lambda: work)
    time.sleep(3 * POLL_INTERVAL_S)
    assert work.asked == 0
    watchdog.issue("gather blocks.1", OnDevice)
    assert work.asked == 1
    watchdog.close()


BLOCKED = """
import threading, time
import torch.distributed as dist
from tests.comm.test_watchdog import OnDevice, alone

watchdog = alone()
watchdog.issue("gather blocks.4", OnDevice)
threading.Event().wait()  # as for a device
"""


def test_a_rank_blocked_by_its_device_ends_with_the_position_of_the_stall() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and time.monotonic() - began > SHORT + RAISE_TIMEOUT_S
    *stack, last = done.stderr.splitlines()
    assert last.startswith("zeroengine.errors.DivergenceError: rank 0 has waited 1 s"), done.stderr
    assert stack[0] == "Traceback (most recent call last):" and "line 8, in <module>" in done.stderr
