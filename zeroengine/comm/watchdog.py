"""When a rank fails or stalls, every rank says where it is.

Each rank records the operation it issued last, and the one it waits for. A rank whose operation fails or times out
raises an alarm in the process group's store; a thread on every rank answers it with that rank's record,
even while the rank itself is stuck. Whoever raised the alarm puts the answers into its error.

[Note: Stalls on a device]
On CUDA nobody on the host waits for a collective, and the host runs ahead of the device: that an operation was issued
last says nothing about a stall. So the thread looks after what was issued (``Watchdog.issue``). An operation that is
not through ``timeout`` seconds later has stalled, and a rank waits at the first of those that are not through. The
error is raised where the rank next issues an operation. A rank that does not come that far, because its host waits for
the device by now, cannot be woken: then the thread says what there is to say, and ends the process.

[Note: Waits that may be long]
When ranks exchange facts, or save together, one of them may be busy with its disk for longer than any timeout. So
after the timeout a rank asks where the others are, and goes on waiting as long as all of them answer (``long_wait``).
"""

from __future__ import annotations

import datetime
import itertools
import json
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from zeroengine.errors import DivergenceError
from zeroengine.utils.work import Work

log = logging.getLogger("zeroengine")

POLL_S = 0.5
ANSWER_S = 4.0
READER_POLL_S = 0.1
READER_SHARE = 0.75  # of the patience, in which answers are waited for; the rest is for the report to reach all
PUBLISH_S = 1.0  # more for the next reader, where one has ended
RECENT_S = 20.0  # while what was answered still says something
LINGER_S = 1.0
LAST_CHANCE_S = 2.0  # for a rank to raise the error of a stall by itself
HOST_VARIABLE = "ZEROENGINE_HOST"  # this node as the launcher calls it


class Place(NamedTuple):
    """Where a rank is."""

    waits: bool  # for the operation; otherwise it has gone past it
    what: str


@dataclass(eq=False)
class Issued:
    """An operation that the thread looks after."""

    what: str
    at: float  # time.monotonic
    work: Work | None = None  # None while it is being issued: a first one waits for the other ranks there
    patient: bool = False  # see "Waits that may be long"
    told: bool = False  # that it takes long

    def is_through(self) -> bool:
        """Return whether the device has run it."""
        return self.work is not None and self.work.done()


class Record:
    """Where this rank is, for itself and for the watchdog's thread."""

    def __init__(self) -> None:
        self.at = Place(False, "its start")
        self.error: DivergenceError | None = None  # to be raised by the rank
        self.raised = threading.Event()
        self._under_way: deque[Issued] = deque()  # in the order in which they were issued
        self._lock = threading.Lock()

    def place(self) -> Place:
        """Return where the rank is: at the first operation that is not done, else past the last."""
        first = self._first()
        return self.at if first is None else Place(True, first.what)

    def begin(self, what: str, patient: bool = False) -> Issued:
        """Add an operation that is issued next, or raise the error of a stall."""
        if self.error is not None:
            self.raised.set()
            raise self.error
        self._first()
        issued = Issued(what, time.monotonic(), patient=patient)
        with self._lock:
            self._under_way.append(issued)
        return issued

    def drop(self, issued: Issued) -> None:
        """Forget an operation."""
        with self._lock:
            self._under_way.remove(issued)

    def holds(self, issued: Issued) -> bool:
        """Return whether an operation is still under way."""
        with self._lock:
            return issued in self._under_way

    def stalled(self, timeout: float) -> Issued | None:
        """The first operation that is not through, if it was issued so many seconds ago.

        Looks at no device before that time: a query there would disturb another thread that captures a CUDA graph.
        """
        late = time.monotonic() - timeout
        with self._lock:
            if not self._under_way or self._under_way[0].at > late:
                return None
        first = self._first()
        return first if first is not None and first.at <= late else None

    def _first(self) -> Issued | None:
        """The first operation that is not through; those before it are forgotten."""
        with self._lock:
            while self._under_way and self._under_way[0].is_through():
                self._under_way.popleft()
            return self._under_way[0] if self._under_way else None


Answers = dict[int, tuple[int, Place]]  # by rank: which alarm it answered, and where it was


class Board:
    """Where the ranks raise alarms and answer them: the process group's store, through a client of its own.

    [Note: One reader for each alarm]
    Ranks that notice a stall together share one alarm, and the first of them reads the answers for all, so that the
    number of requests grows with the number of ranks and not with its square. The keys, for alarm n:

    - ``alarm``: the number of alarms so far;
    - ``reader/n``: how many ranks wanted to read the answers; the first to add to it does. Where it has ended before it
      has published them, the first to add to ``reader/n/1`` does, and so on;
    - ``answers/n``: a line for each rank that has answered;
    - ``report/n``: all answers, published by the reader. A later question begins the next alarm.
    """

    def __init__(self, store: dist.Store, rank: int, hosts: Sequence[str]) -> None:
        self.rank, self.hosts = rank, hosts
        self._store = store
        self._answered, self._answered_at = 0, 0.0  # which alarm, and when (time.monotonic)
        self._lock = threading.Lock()

    def answer(self, place: Callable[[], Place]) -> None:
        """To an alarm, where there is a new one; looks for the place only then."""
        with self._lock:
            self._answer_alarm(self._store.add("alarm", 0), place)

    def ask(self, own: Place, patience: float = ANSWER_S, again: bool = False) -> dict[int, Place | None] | None:
        """Where each rank is, None for those that do not answer in time; None where the store does not.

        Args:
            again: whether each must answer now. Else what it answered to another a moment ago counts, where it does not
                answer again: it may have ended over what it was told.
        """
        try:
            with self._lock:
                earlier = self._answered if time.monotonic() < self._answered_at + RECENT_S else 0
                alarm = max(1, self._store.add("alarm", 0))
                while self._store.check([f"report/{alarm}"]):
                    alarm += 1
                reads = self._store.add(f"reader/{alarm}", 1) == 1
                if reads:
                    self._store.set("alarm", str(alarm))
                self._answer_alarm(alarm, lambda: own)
            answers = self._read(alarm, earlier, patience) if reads else self._await_report(alarm, earlier, patience)
        except RuntimeError:
            return None
        oldest = alarm if again else earlier or alarm
        places: dict[int, Place | None] = dict.fromkeys(range(len(self.hosts)))
        places |= {rank: place for rank, (number, place) in answers.items() if number >= oldest}
        return {**places, self.rank: own}

    def _answer_alarm(self, alarm: int, place: Callable[[], Place]) -> None:
        if alarm > self._answered:
            self._answered, self._answered_at = alarm, time.monotonic()
            self._store.append(f"answers/{alarm}", json.dumps([self.rank, *place()]) + "\n")  # type: ignore[attr-defined]

    def _read(self, alarm: int, earlier: int, patience: float) -> Answers:
        """Wait for the answers, and publish them; of ranks that do not answer, those to alarms from `earlier` on."""
        deadline = time.monotonic() + READER_SHARE * patience
        lines = b""
        while lines.count(b"\n") < len(self.hosts) and time.monotonic() < deadline:
            time.sleep(READER_POLL_S)
            with self._lock:
                lines = self._store.get(f"answers/{alarm}")
        answers: Answers = {}
        for number in range(earlier or alarm, alarm + 1):
            with self._lock:
                key = f"answers/{number}"
                lines = self._store.get(key) if self._store.check([key]) else b""
            answers |= {rank: (number, Place(*place)) for rank, *place in map(json.loads, lines.splitlines())}
        groups: dict[tuple[int, Place], list[int]] = {}
        for rank, answer in answers.items():
            groups.setdefault(answer, []).append(rank)
        report = [[number, *place, ranks] for (number, place), ranks in groups.items()]
        with self._lock:
            self._store.set(f"report/{alarm}", json.dumps(report))
        return answers

    def _await_report(self, alarm: int, earlier: int, patience: float) -> Answers:
        """What the reader has published; where it has ended without that, read in its stead."""
        key = f"report/{alarm}"
        for attempt in itertools.count(1):
            if self._is_published(key, patience):
                with self._lock:
                    report = json.loads(self._store.get(key))
                answers: Answers = {}
                for number, *place, ranks in report:
                    answers |= dict.fromkeys(ranks, (number, Place(*place)))
                return answers
            patience = PUBLISH_S
            with self._lock:
                reads = self._store.add(f"reader/{alarm}/{attempt}", 1) == 1
                if reads:
                    self._store.set("alarm", str(alarm))  # which the one before may not have come to
            if reads:
                break
        return self._read(alarm, earlier, PUBLISH_S)

    def _is_published(self, key: str, seconds: float) -> bool:
        """Wait for the key: one request, where asking again and again would be dozens from each rank."""
        try:
            with self._lock:
                self._store.wait([key], datetime.timedelta(seconds=seconds))
        except RuntimeError:
            with self._lock:
                return self._store.check([key])  # raises where the store is gone
        return True

    def report(self, own: Place) -> str:
        """Where each rank is, in one sentence; waits a few seconds for the answers."""
        found = self.describe(self.ask(own), own)
        if self.rank == 0:
            time.sleep(LINGER_S)  # the others ask at about the same time, and the store ends with this rank
        return found

    def describe(self, places: Mapping[int, Place | None] | None, own: Place) -> str:
        """Say where the ranks are, in one sentence."""
        if places is None:
            return f"{describe({self.rank: own}, self.hosts)}; the store (hosted by rank 0) does not answer"
        return describe(places, self.hosts)


class Watchdog:
    """One rank's record, and its answer to alarms. ``store`` must be this watchdog's own client.

    Args:
        hosts: each rank's host by name; empty where nobody named it.
        timeout: seconds after which an operation that was issued has stalled.
    """

    def __init__(self, store: dist.Store, rank: int, hosts: Sequence[str], timeout: float) -> None:
        self._board, self._record = Board(store, rank, hosts), Record()
        self._closed = threading.Event()
        # The thread holds no reference to this object, so that it ends with it.
        arguments = (self._board, self._record, timeout, self._closed)
        thread = threading.Thread(target=_watch, args=arguments, name="zeroengine-watchdog", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._closed, thread)

    def record(self, what: str) -> None:
        """Note the operation that this rank issues next."""
        self._record.at = Place(False, what)

    def close(self) -> None:
        """End the thread."""
        self._finalizer()

    def issue(self, what: str, run: Callable[[], Work]) -> Work:
        """What ``run`` issues; the thread looks after it from now on. See "Stalls on a device" above.

        Raises:
            DivergenceError: an operation before it has stalled.
        """
        issued = self._record.begin(what)
        self.record(what)
        try:
            issued.work = work = run()
        except BaseException:
            self._record.drop(issued)
            raise
        return work

    @contextmanager
    def long_wait(self, what: str) -> Iterator[None]:
        """Around a wait for other ranks that is ended only when one of them does not answer."""
        issued = self._record.begin(what, patient=True)
        try:
            yield
        finally:
            self._record.drop(issued)

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turns a failing operation, which is issued or awaited within, into an error that names units and ranks."""
        before, self._record.at = self._record.at, Place(True, what)
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, DivergenceError):
                raise
            cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            where = self._board.report(self._record.at)
            raise DivergenceError(f"rank {self._board.rank} could not finish {what} ({cause}): {where}.") from error
        self._record.at = before


def describe(places: Mapping[int, Place | None], hosts: Sequence[str]) -> str:
    """Where the ranks are, in one sentence: those in the smallest company first. None stands for no answer."""
    groups: dict[Place | None, list[int]] = {}
    for rank, place in sorted(places.items()):
        groups.setdefault(place, []).append(rank)
    *few, most = sorted(groups, key=lambda place: (place is not None, len(groups[place])))
    parts = [_sentence(_names(groups[place], hosts), len(groups[place]) > 1, place) for place in few]
    others = len(groups[most]) > 1 and bool(few)
    names = "the others" if others else _names(groups[most], hosts)
    return ", ".join([*parts, _sentence(names, len(groups[most]) > 1, most)])


def _sentence(names: str, several: bool, place: Place | None) -> str:
    if place is None:
        return f"{names} do{'' if several else 'es'} not answer (ended?)"
    if place.waits:
        return f"{names} wait{'' if several else 's'} at {place.what}"
    return f"{names} {'are' if several else 'is'} at {place.what}"


def _names(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """``rank 3 (node-b)``, or ``ranks 2, 3 (node-b) and 5 (node-c)``."""
    by_host: dict[str, list[str]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(str(rank))
    parts = [f"{', '.join(found)}{_on(host)}" for host, found in by_host.items()]
    return f"rank{'s' * (len(ranks) > 1)} {' and '.join(parts)}"


def _on(host: str) -> str:
    return f" ({host})" if host else ""


def host_name() -> str:
    """Return this node's name as the launcher calls it, or an empty string."""
    return os.environ.get(HOST_VARIABLE, "")


def _watch(board: Board, record: Record, timeout: float, closed: threading.Event) -> None:
    answers = True
    while not closed.wait(POLL_S):
        try:
            if answers:
                board.answer(record.place)
        except RuntimeError:
            answers = False  # the store is gone, and the run with it
        if (stalled := record.stalled(timeout)) is None:
            continue
        waited = f"rank {board.rank} has waited {timeout:g} s (comm.timeout_seconds) for {stalled.what}"
        own = record.place()
        places = board.ask(own, 2 * ANSWER_S if stalled.patient else ANSWER_S, again=stalled.patient)
        where = board.describe(places, own)
        if stalled.patient:
            if not record.holds(stalled):
                continue  # it is over
            if places is not None and None not in places.values():
                if not stalled.told and board.rank == min(rank for rank, place in places.items() if place == own):
                    log.warning("%s, and goes on waiting: %s", waited, where)
                stalled.at, stalled.told = time.monotonic(), True
                continue
        record.error = DivergenceError(f"{waited}: {where}.")
        if not record.raised.wait(LAST_CHANCE_S):
            _end_process(record.error)
        return


def _end_process(error: DivergenceError) -> NoReturn:
    """As if the main thread had raised the error where it is, and with no more ado: it may wait for ever."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.format_stack(frame) if frame is not None else []
    lines = ["Traceback (most recent call last):\n", *stack, *traceback.format_exception_only(error)]
    sys.stderr.write("".join(lines))
    sys.stderr.flush()
    os._exit(1)


def _stop(closed: threading.Event, thread: threading.Thread) -> None:
    closed.set()
    thread.join(2 * POLL_S)
