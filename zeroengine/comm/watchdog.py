"""Report the position of every rank when one of them fails or stalls.

Each rank records the operation that it issued last, and the operation that it waits for. A rank whose operation fails
or times out raises an alarm in the process group's store. A thread on every rank answers with that rank's record, even
while the rank itself is stuck. The rank that raised the alarm puts the answers into its error.

[Note: Stalls on a device]
On CUDA the host does not wait for collectives and runs ahead of the device, so the last issued operation says nothing
about a stall. The thread therefore watches all issued operations (``Watchdog.issue``). An operation that is not done
after ``timeout`` seconds has stalled, and the rank waits at the first operation that is not done. The rank raises the
error when it next issues an operation. If its host waits for the device and issues nothing more, it cannot be woken:
then the thread prints the error and ends the process.

[Note: Waits that may be long]
When ranks exchange facts, or save together, one of them may be busy with its disk for longer than any timeout. So
after the timeout a rank asks for the positions of the others, and goes on waiting as long as all of them answer
(``long_wait``).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from zeroengine.comm.alarm_board import ANSWER_TIMEOUT_S, AlarmBoard, RankPosition
from zeroengine.comm.divergence import Divergence
from zeroengine.errors import DivergenceError
from zeroengine.utils.process_finalizer import finalize
from zeroengine.utils.work import Work

log = logging.getLogger("zeroengine")

POLL_INTERVAL_S = 0.5
# The time in which a rank can raise the error of a stall before the thread ends its process.
RAISE_TIMEOUT_S = 2.0
# The variable with this node's name as the launcher calls it.
HOST_VARIABLE = "ZEROENGINE_HOST"


@dataclass(eq=False)
class IssuedOperation:
    """An operation that the thread watches.

    Attributes:
        what: The operation, for people.
        issued_at: The time at which it was issued, by ``time.monotonic``.
        work: The operation. None while it is being issued: the first one of a communicator waits for the other ranks.
        patient: Whether it may take long. See "Waits that may be long".
        has_warned: Whether a warning has said that it takes long.
    """

    what: str
    issued_at: float
    work: Work | None = None
    patient: bool = False
    has_warned: bool = False


class OperationRecord:
    """The operations that this rank has issued. The rank and the watchdog's thread share it."""

    def __init__(self, divergence: Divergence) -> None:
        self.position, self.divergence = RankPosition(False, "its start"), divergence
        # The thread sets the error, and the rank raises it when it next issues an operation.
        self.error: DivergenceError | None = None
        self.error_raised = threading.Event()
        # In the order of issue. The rank appends operations, and both threads remove those that are done.
        self._under_way: deque[IssuedOperation] = deque()
        self._lock = threading.Lock()

    def place(self) -> RankPosition:
        """Return the rank's position: at the first operation that is not done, else past the last."""
        first = self._first()
        return self.position if first is None else self.at(True, first.what)

    def at(self, waits: bool, what: str) -> RankPosition:
        """Return a position of this rank now."""
        return RankPosition(waits, what, *self.divergence.num_forwards)

    def begin(self, what: str, patient: bool = False) -> IssuedOperation:
        """Add an operation that is issued next, or raise the error of a stall."""
        if self.error is not None:
            self.error_raised.set()
            raise self.divergence.error(str(self.error))
        # This drops finished operations. Otherwise the queue would grow between two calls of ``place``.
        self._first()
        issued = IssuedOperation(what, time.monotonic(), patient=patient)
        with self._lock:
            self._under_way.append(issued)
        return issued

    def drop(self, issued: IssuedOperation) -> None:
        """Forget an operation."""
        with self._lock:
            self._under_way.remove(issued)
        if self.error is not None:
            self.error_raised.set()

    def holds(self, issued: IssuedOperation) -> bool:
        """Return whether an operation is still under way."""
        with self._lock:
            return issued in self._under_way

    def stalled(self, timeout: float) -> IssuedOperation | None:
        """Return the first operation that is not done, if it was issued at least ``timeout`` seconds ago.

        No device is asked before that time: a query would disturb another thread that captures a CUDA graph.
        """
        late = time.monotonic() - timeout
        with self._lock:
            if not self._under_way or self._under_way[0].issued_at > late:
                return None
        first = self._first()
        return first if first is not None and first.issued_at <= late else None

    def _first(self) -> IssuedOperation | None:
        """Return the first operation that is not done, and forget those before it."""
        with self._lock:
            while self._under_way and (work := self._under_way[0].work) is not None and work.done():
                self._under_way.popleft()
            return self._under_way[0] if self._under_way else None


class Watchdog:
    """One rank's record of operations, and the thread that answers alarms with it.

    Args:
        store: A client of the process group's store that nobody else uses.
        rank: This rank.
        hosts: Each rank's host by name; an empty string where nobody named it.
        timeout: Seconds after which an operation that was issued has stalled.
        divergence: Refuses operations after a divergence, and learns of the first one. None: one of this object alone.

    Attributes:
        divergence: See above.
    """

    def __init__(
        self, store: dist.Store, rank: int, hosts: Sequence[str], timeout: float, divergence: Divergence | None = None
    ) -> None:
        self.divergence = Divergence() if divergence is None else divergence
        self._board, self._record = AlarmBoard(store, rank, hosts), OperationRecord(self.divergence)
        self._closed = threading.Event()
        # The thread holds no reference to this object, so that the thread ends with the object.
        arguments = (self._board, self._record, timeout, self._closed)
        thread = threading.Thread(target=_watch, args=arguments, name="zeroengine-watchdog", daemon=True)
        thread.start()
        self._finalizer = finalize(self, _stop, self._closed, thread)

    def record(self, what: str) -> None:
        """Note the operation that this rank issues next. Raise ``DivergenceError`` after a divergence."""
        self.divergence.check(what)
        self._record.position = self._record.at(False, what)

    def close(self) -> None:
        """End the thread."""
        self._finalizer()

    def issue(self, what: str, run: Callable[[], Work]) -> Work:
        """Issue an operation, which the thread then watches. See "Stalls on a device" above.

        Args:
            what: The operation, for people.
            run: Issues it.

        Returns:
            The result of ``run``.

        Raises:
            DivergenceError: An earlier operation has stalled.
        """
        # The operation is recorded before it is issued: the first one of a communicator waits for the other ranks in
        # ``run``.
        self.record(what)
        issued = self._record.begin(what)
        try:
            issued.work = work = run()
        except BaseException:
            self._record.drop(issued)
            raise
        return work

    @contextmanager
    def long_wait(self, what: str) -> Iterator[None]:
        """Surround a wait for other ranks that only ends early when one of them does not answer."""
        issued = self._record.begin(what, patient=True)
        try:
            yield
        finally:
            self._record.drop(issued)

    def report(self) -> str:
        """Return the positions of all ranks in one sentence. Waits a few seconds for their answers."""
        return self._board.report(self._record.position) + "."

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turn a failure of the operation that is issued or awaited inside into an error that names units and ranks."""
        # The other thread sees either the old position or the new one, because an assignment is atomic.
        before, self._record.position = self._record.position, self._record.at(True, what)
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, DivergenceError):
                raise
            cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            where = self._board.report(self._record.position)
            message = f"rank {self._board.rank} could not finish {what} ({cause}): {where}."
            raise self.divergence.error(message) from error
        # Only success restores the position: after a failure the other ranks learn where this rank waited.
        self._record.position = before


def host_name() -> str:
    """Return this node's name as the launcher calls it, or an empty string."""
    return os.environ.get(HOST_VARIABLE, "")


def _watch(board: AlarmBoard, record: OperationRecord, timeout: float, closed: threading.Event) -> None:
    # False once the store is gone. The thread still looks for stalls then.
    answers = True
    while not closed.wait(POLL_INTERVAL_S):
        try:
            if answers:
                board.answer(record.place)
        except RuntimeError:
            # The store is gone, and the run with it.
            answers = False
        if (stalled := record.stalled(timeout)) is None:
            continue
        waited = f"rank {board.rank} has waited {timeout:g} s (comm.timeout_seconds) for {stalled.what}"
        # Each rank that sees the stall asks by itself. ``AlarmBoard`` joins their questions into one alarm.
        own = record.place()
        places = board.ask(own, 2 * ANSWER_TIMEOUT_S if stalled.patient else ANSWER_TIMEOUT_S, again=stalled.patient)
        where = board.describe(places, own)
        if stalled.patient:
            # The wait may have ended while the other ranks were asked.
            if not record.holds(stalled):
                continue
            if places is not None and None not in places.values():
                # One rank warns for all that wait at the same place.
                if not stalled.has_warned and board.rank == min(rank for rank, place in places.items() if place == own):
                    log.warning("%s, and goes on waiting: %s", waited, where)
                stalled.issued_at, stalled.has_warned = time.monotonic(), True
                continue
        record.error = DivergenceError(f"{waited}: {where}.")
        # A rank that does not answer may have ended its engine after an error, of which an exchange tells this rank.
        if not record.error_raised.wait(2 * ANSWER_TIMEOUT_S if stalled.patient else RAISE_TIMEOUT_S):
            _end_process(record.error)
        return


def _end_process(error: DivergenceError) -> NoReturn:
    """End the process as if the main thread had raised the error where it is. That thread may wait for ever."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.format_stack(frame) if frame is not None else []
    lines = ["Traceback (most recent call last):\n", *stack, *traceback.format_exception_only(error)]
    sys.stderr.write("".join(lines))
    sys.stderr.flush()
    # An ordinary exit would wait for the device or for the main thread, which may never come back.
    os._exit(1)


def _stop(closed: threading.Event, thread: threading.Thread) -> None:
    closed.set()
    # The thread may be in a request to a store that no longer answers. It is a daemon, so the wait may end without it.
    thread.join(2 * POLL_INTERVAL_S)
