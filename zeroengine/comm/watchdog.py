"""When a rank fails or stalls, every rank says where it is.

Each rank records the operation it issued last, and the one it waits for. A rank whose operation fails or times out
raises an alarm in the process group's store; a thread on every rank answers it with that rank's record,
even while the rank itself is stuck. Whoever raised the alarm puts the answers into its error.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist

from ..errors import DivergenceError

POLL_S = 0.5
ANSWER_S = 4.0
HOST_VARIABLE = "ZEROENGINE_HOST"  # this node as the launcher calls it


class Place(NamedTuple):
    """Where a rank is."""

    waits: bool  # for the operation; otherwise it has gone past it
    what: str


class Watchdog:
    """One rank's record, and its answer to alarms. ``store`` must be this watchdog's own client.

    Args:
        hosts: each rank's host by name; empty where nobody named it.
    """

    def __init__(self, store: dist.Store, rank: int, hosts: Sequence[str]) -> None:
        self._store, self._rank, self._hosts = store, rank, hosts
        self._at = [Place(False, "its start")]
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # The thread holds no reference to this object, so that it ends with it.
        arguments = (store, self._lock, f"at/{rank}", self._at, self._closed)
        thread = threading.Thread(target=_answer, args=arguments, name="zeroengine-watchdog", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._closed, thread)

    def record(self, what: str) -> None:
        self._at[0] = Place(False, what)

    def close(self) -> None:
        self._finalizer()

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turns a failing operation, which is issued or awaited within, into an error that names units and ranks."""
        before, self._at[0] = self._at[0], Place(True, what)
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, DivergenceError):
                raise
            cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DivergenceError(f"rank {self._rank} could not finish {what} ({cause}): {self.report()}.") from error
        self._at[0] = before

    def report(self) -> str:
        """Where each rank is; waits a few seconds for the answers."""
        places: dict[int, Place | None] = dict.fromkeys(range(len(self._hosts)))
        places[self._rank] = self._at[0]
        deadline = time.monotonic() + ANSWER_S
        try:
            with self._lock:
                self._store.set("alarm", "1")
            while None in places.values() and time.monotonic() < deadline:
                for r in [r for r, place in places.items() if place is None]:
                    with self._lock:
                        if self._store.check([f"at/{r}"]):
                            places[r] = Place(*json.loads(self._store.get(f"at/{r}")))
                time.sleep(0.05)
        except RuntimeError:
            where = describe({self._rank: self._at[0]}, self._hosts)
            return f"{where}; the store (hosted by rank 0) does not answer"
        return describe(places, self._hosts)


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


def own_host() -> str:
    return os.environ.get(HOST_VARIABLE, "")


def _answer(store: dist.Store, lock: threading.Lock, key: str, at: list[Place], closed: threading.Event) -> None:
    while not closed.wait(POLL_S):
        try:
            with lock:
                if store.check(["alarm"]):
                    store.set(key, json.dumps(at[0]))
                    return
        except RuntimeError:
            return  # the store is gone, and the run with it


def _stop(closed: threading.Event, thread: threading.Thread) -> None:
    closed.set()
    thread.join(2 * POLL_S)
