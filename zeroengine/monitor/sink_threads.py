"""Feed sinks from threads, so that training waits for none of them."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from zeroengine.monitor.record import RunEvent, Sink, StepRecord

log = logging.getLogger("zeroengine")

OpenSink = Callable[[], Sink]
# The records that wait for a sink at most. A slow server then costs records rather than memory.
CAPACITY = 1000
CLOSE_TIMEOUT_S = 30.0


class SinkThreads:
    """Several sinks, each on a thread of its own with a queue. It has the methods of a ``Sink``, and none waits.

    A sink that cannot be opened, or that raises, is put off with one warning; the others go on. While a sink does not
    keep up, its oldest waiting records are dropped, which costs one warning as well.

    Args:
        openers: What opens each sink, on the sink's own thread, by its name in warnings.
        capacity: The records and events that wait for a sink at most.

    Attributes:
        before_exit: Called when the interpreter exits with sinks that were not closed. It should close them.
    """

    def __init__(self, openers: Mapping[str, OpenSink], capacity: int = CAPACITY) -> None:
        self.before_exit: Callable[[], object] = self.close
        self._queues = [
            _SinkQueue(name, open_sink, capacity, self._call_before_exit) for name, open_sink in openers.items()
        ]

    def _call_before_exit(self) -> None:
        self.before_exit()

    def step(self, record: StepRecord) -> None:
        """Queue the record of a step."""
        for queue in self._queues:
            queue.put(record)

    def event(self, event: RunEvent) -> None:
        """Queue an event."""
        for queue in self._queues:
            queue.put(event)

    def close(self, timeout_seconds: float = CLOSE_TIMEOUT_S) -> None:
        """Let the sinks take what is queued, and close them.

        Args:
            timeout_seconds: How long to wait for all of them. What a sink has not taken by then is lost, which is said.
        """
        atexit.unregister(self._call_before_exit)
        for queue in self._queues:
            queue.end()
        deadline = time.monotonic() + timeout_seconds
        for queue in self._queues:
            queue.join(deadline)


class _SinkQueue:
    """The queue and the thread of one sink. ``before_exit`` is called when the interpreter exits."""

    def __init__(self, name: str, open_sink: OpenSink, capacity: int, before_exit: Callable[[], None]) -> None:
        self._name, self._open, self._capacity = name, open_sink, capacity
        self._before_exit = before_exit
        self._waiting: deque[StepRecord | RunEvent] = deque()
        self._num_dropped = 0
        self._is_off = self._has_ended = False
        self._changed = threading.Condition()
        # A daemon, so that a server that does not answer never keeps the process.
        self._thread = threading.Thread(target=self._run, name=f"zeroengine: {name}", daemon=True)
        self._thread.start()

    def put(self, item: StepRecord | RunEvent) -> None:
        with self._changed:
            if self._is_off or self._has_ended:
                return
            first_dropped = False
            if len(self._waiting) >= self._capacity:
                self._waiting.popleft()
                self._num_dropped += 1
                first_dropped = self._num_dropped == 1
            self._waiting.append(item)
            self._changed.notify()
        if first_dropped:
            log.warning(
                "%s does not keep up: the oldest of %d records that wait for it are dropped from now on. Training goes "
                "on; other outputs are whole.",
                self._name,
                self._capacity,
            )

    def end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify()

    def join(self, deadline: float) -> None:
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            log.warning("%s has not taken %d records by the end of the run", self._name, len(self._waiting))
        elif self._num_dropped:
            log.warning("%s lacks %d records, which it was too slow for", self._name, self._num_dropped)

    def _run(self) -> None:
        sink = None
        try:
            sink = self._open()
            # Libraries end their runs when the interpreter exits. The function that is registered last runs first, so
            # this one takes in the last records before that.
            if not self._has_ended:
                atexit.register(self._before_exit)
            while (item := self._next()) is not None:
                if isinstance(item, StepRecord):
                    sink.step(item)
                else:
                    sink.event(item)
        # Libraries raise errors of any kind, and some end the process by SystemExit, which ends this thread alone.
        except BaseException as error:
            self._put_off(error, "goes on without it")
        if sink is not None:
            try:
                sink.close()
            except BaseException as error:
                self._put_off(error, "was not affected; its last records may be missing")

    def _next(self) -> StepRecord | RunEvent | None:
        """Return the next item, or None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._has_ended)
            return self._waiting.popleft() if self._waiting else None

    def _put_off(self, error: BaseException, consequence: str) -> None:
        with self._changed:
            was_off, self._is_off = self._is_off, True
            self._waiting.clear()
        if not was_off:
            reason = str(error).strip() or type(error).__name__
            log.warning("%s failed, and training %s: %s", self._name, consequence, reason)
