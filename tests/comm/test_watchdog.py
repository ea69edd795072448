"""Where the ranks are, in one sentence; and which operation of a device has stalled, when nobody waits for it."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from zeroengine.comm.watchdog import LAST_CHANCE_S, POLL_S, Board, Place, Watchdog, describe
from zeroengine.errors import DivergenceError

GATHER, REDUCE = "gather blocks.4", "reduce blocks.7"
HOSTS = ["node-a", "node-a", "node-b", "node-b"]


@pytest.mark.parametrize(
    ("places", "hosts", "sentence"),
    [
        (
            [Place(True, REDUCE)] * 3 + [Place(False, GATHER)],
            HOSTS,
            "rank 3 (node-b) is at gather blocks.4, the others wait at reduce blocks.7",
        ),
        (
            [Place(True, REDUCE), None, Place(True, REDUCE), Place(True, REDUCE)],
            HOSTS,
            "rank 1 (node-a) does not answer (ended?), the others wait at reduce blocks.7",
        ),
        (
            [Place(False, GATHER)] * 2 + [Place(True, REDUCE)] * 2,
            HOSTS,
            "ranks 0, 1 (node-a) are at gather blocks.4, the others wait at reduce blocks.7",
        ),
        (
            [Place(False, GATHER), Place(True, REDUCE)],
            ["", ""],
            "rank 0 is at gather blocks.4, rank 1 waits at reduce blocks.7",
        ),
        ([Place(True, GATHER)] * 4, HOSTS, "ranks 0, 1 (node-a) and 2, 3 (node-b) wait at gather blocks.4"),
        (
            [None, None, Place(True, GATHER)],
            ["", "", ""],
            "ranks 0, 1 do not answer (ended?), rank 2 waits at gather blocks.4",
        ),
    ],
)
def test_the_odd_ones_come_first_and_the_rest_are_the_others(
    places: list[Place | None], hosts: list[str], sentence: str
) -> None:
    assert describe(dict(enumerate(places)), hosts) == sentence


# -- alarms -------------------------------------------------------------------------------------------


def test_what_a_rank_said_before_it_ended_is_still_told() -> None:
    """Two find out that they wait for each other: one is told, and ends, before the other asks."""
    store = dist.HashStore()
    first, second = (Board(store, rank, ["", ""]) for rank in range(2))
    places = [Place(True, GATHER), Place(True, REDUCE)]
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


def ask_all(boards: list[Board], patience: float) -> list[Any]:
    """What each learns where all but the last ask at the same time."""
    with ThreadPoolExecutor(len(boards)) as threads:
        asked = [threads.submit(board.ask, Place(True, GATHER), patience) for board in boards[:-1]]
        while not all(question.done() for question in asked):
            boards[-1].answer(lambda: Place(False, REDUCE))
            time.sleep(0.05)
    return [question.result() for question in asked]


def test_a_report_to_all_ranks_takes_a_few_requests_of_each() -> None:
    store, ranks = CountingStore(dist.HashStore()), 48
    boards = [Board(store, rank, [""] * ranks) for rank in range(ranks)]  # type: ignore[arg-type]
    found = ask_all(boards, 10.0)
    everywhere = dict.fromkeys(range(ranks - 1), Place(True, GATHER)) | {ranks - 1: Place(False, REDUCE)}
    assert found == [everywhere] * (ranks - 1)
    assert store.requests < 10 * ranks


def test_a_report_does_not_end_with_the_rank_that_was_to_write_it() -> None:
    store = dist.HashStore()
    store.add("reader/1", 1)  # rank 0 has begun to, and ended
    boards = [Board(store, rank, [""] * 4) for rank in range(1, 4)]
    everywhere = {0: None, 1: Place(True, GATHER), 2: Place(True, GATHER), 3: Place(False, REDUCE)}
    assert ask_all(boards, 0.5) == [everywhere] * 2


# -- operations that nobody waits for -----------------------------------------------------------------

SHORT = 1.0  # seconds: comm.timeout_seconds


class OnDevice:
    """An operation that is through when told so."""

    def __init__(self, completed: bool = False) -> None:
        self.completed = completed
        self.asked = 0

    def wait_stream(self) -> None: ...

    def wait_host(self) -> None: ...

    def done(self) -> bool:
        self.asked += 1
        return self.completed


def alone(timeout: float = SHORT) -> Watchdog:
    return Watchdog(dist.HashStore(), 0, ["node-a"], timeout)


def test_the_first_operation_that_is_not_through_has_stalled_and_the_next_to_be_issued_says_so() -> None:
    watchdog = alone()
    for number, completed in enumerate((True, False, True, False)):
        watchdog.issue(f"gather blocks.{number}", lambda: OnDevice(completed))  # noqa: B023
    began = time.monotonic()
    while time.monotonic() - began < SHORT + LAST_CHANCE_S:
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


def test_operations_that_are_through_in_time_and_those_that_were_never_issued_are_no_stall() -> None:
    watchdog, works = alone(), []
    with pytest.raises(MemoryError):
        watchdog.issue("gather blocks.0", lambda: exec("raise MemoryError"))
    for _ in range(20):
        works.append(watchdog.issue("gather blocks.0", OnDevice))
        time.sleep(0.15 * SHORT)
        works[-1].completed = True  # type: ignore[attr-defined]
    assert watchdog.issue("gather blocks.1", OnDevice) is not works[-1]
    watchdog.close()


def test_before_its_time_nobody_but_the_rank_itself_asks_the_device() -> None:
    """Whose other threads may be capturing a graph."""
    watchdog, work = alone(timeout=60.0), OnDevice()
    watchdog.issue("gather blocks.0", lambda: work)
    time.sleep(3 * POLL_S)
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


def test_a_rank_that_waits_for_its_device_ends_and_says_where_it_was() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and time.monotonic() - began > SHORT + LAST_CHANCE_S
    *stack, last = done.stderr.splitlines()
    assert last.startswith("zeroengine.errors.DivergenceError: rank 0 has waited 1 s"), done.stderr
    assert stack[0] == "Traceback (most recent call last):" and "line 8, in <module>" in done.stderr
