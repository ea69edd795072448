"""When a rank fails or stalls, every rank says where it is.

Each rank records the last operation it issued on each channel. A rank whose operation fails or times out
raises an alarm in the process group's store; a thread on every rank answers it with that rank's record,
even while the rank itself is stuck. Whoever raised the alarm puts the answers into its error.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ..errors import DivergenceError

POLL_S = 0.5
ANSWER_S = 4.0


class Watchdog:
    """One rank's record, and its answer to alarms. ``store`` must be this watchdog's own client."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._last: dict[str, str] = {}
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # The thread holds no reference to this object, so that it ends with it.
        arguments = (store, self._lock, f"at/{rank}", self._last, self._closed)
        thread = threading.Thread(target=_answer, args=arguments, name="zeroengine-watchdog", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._closed, thread)

    def record(self, channel: str, what: str) -> None:
        self._last[channel] = what

    def close(self) -> None:
        self._finalizer()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turns a failing collective into an error that names the units and the ranks."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, DivergenceError):
                raise
            cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DivergenceError(
                f"rank {self._rank} could not finish {_where(self._last)}: {cause}. {self.report()}"
            ) from error

    def report(self) -> str:
        """Where each rank is; waits a few seconds for the answers."""
        lines = [f"rank {self._rank} is at {_where(self._last)}"]
        answers: dict[int, str] = {}
        deadline = time.monotonic() + ANSWER_S
        try:
            with self._lock:
                self._store.set("alarm", "1")
            others = [r for r in range(self._world_size) if r != self._rank]
            while len(answers) < len(others) and time.monotonic() < deadline:
                for r in others:
                    with self._lock:
                        if r not in answers and self._store.check([f"at/{r}"]):
                            answers[r] = json.loads(self._store.get(f"at/{r}"))
                time.sleep(0.05)
        except RuntimeError:
            lines.append("the store (hosted by rank 0) does not answer")
        for r in range(self._world_size):
            if r != self._rank:
                lines.append(f"rank {r} is at {answers[r]}" if r in answers else f"rank {r} does not answer (ended?)")
        return "; ".join(lines) + "."


def _answer(store: dist.Store, lock: threading.Lock, key: str, last: dict[str, str], closed: threading.Event) -> None:
    while not closed.wait(POLL_S):
        try:
            with lock:
                if store.check(["alarm"]):
                    store.set(key, json.dumps(_where(last)))
                    return
        except RuntimeError:
            return  # the store is gone, and the run with it


def _where(last: dict[str, str]) -> str:
    return ", ".join(f"{channel}: {what}" for channel, what in last.items()) or "its start"


def _stop(closed: threading.Event, thread: threading.Thread) -> None:
    closed.set()
    thread.join(2 * POLL_S)
