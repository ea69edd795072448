"""A run on several nodes: the launcher is connected to each, gives it its place, and decides what follows a failure.

[Note: Rounds]
The ranks of all nodes start together and end together; that is a round. A round ends when all ranks have succeeded,
one has failed, a node was lost, or one that was lost is back. Nodes stay connected between rounds, so the next begins
at once.
Only the launcher knows who takes part, so there is nothing for the nodes to agree on.
"""

from __future__ import annotations

import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

from zeroengine.errors import LaunchError
from zeroengine.launch import preflight, versions
from zeroengine.launch.console import Console
from zeroengine.launch.hosts import Host, processes
from zeroengine.launch.job import CPU_PROCESSES
from zeroengine.launch.link import Events, Link
from zeroengine.launch.rank import GRACE, HEARING, Failure, Outcome
from zeroengine.launch.report import report
from zeroengine.launch.shells import Shell
from zeroengine.launch.wire import BEAT, SILENCE, Message, to_bytes

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
TICK = 0.1  # seconds between two looks at clocks and signals
CONNECT = 30.0  # seconds for a connection, from nothing to a Python that speaks
PREPARE = 120.0  # seconds for that Python to import torch from a cold disk
ANSWER = 20.0  # seconds for a short answer
END = 2 * GRACE + 4.0  # seconds for a node's ranks to end
RETRY = 3.0  # seconds between two attempts to reach a node that was lost
RETURN = 60.0  # seconds that a run which needs a lost node waits for it


@dataclass(frozen=True)
class Request:
    """What is to run, where, and how often it may be started again."""

    hosts: Sequence[Host]
    least: int  # nodes with which the run may go on
    shell: Shell
    folder: str
    target: str
    arguments: Sequence[str]
    module: bool = False
    nproc: str = "auto"
    cpu: bool = False
    environment: dict[str, str] = field(default_factory=dict)  # forwarded to every node
    ranks_environment: dict[str, str] = field(default_factory=dict)  # given to every rank
    config: str | None = None  # that every node must be able to read
    overrides: Sequence[str] = ()
    address: str | None = None
    port: int = 0
    bind: str | None = None
    restarts: int = 0
    silence: float = SILENCE
    run_id: str = "none"

    @property
    def elastic(self) -> bool:
        return self.least < len(self.hosts)


@dataclass(frozen=True)
class Round:
    """How a round ended."""

    succeeded: bool = False
    failures: tuple[Failure, ...] = ()
    lost: tuple[Link, ...] = ()


class Stopped(Exception):
    """The launcher got a signal."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number


class Fleet:
    """The nodes of a run, for a `with` block: connects to all of them at once, and at its end leaves nothing there."""

    def __init__(self, request: Request, console: Console) -> None:
        self._request, self._console = request, console
        self._events: Events[tuple[Link, Message]] = queue.Queue(1000)
        self._signal: signal.Signals | None = None
        self._links: list[Link] = []  # one for each host of the request
        self._returning: dict[int, Link] = {}  # new connections to hosts that were lost
        self._members: list[Link] = []
        self._handlers: dict[int, signal._HANDLER] = {}
        self._over = threading.Event()
        self._wanted: Message = {"folder": request.folder, "environment": request.environment}

    def __enter__(self) -> Fleet:
        for number in SIGNALS:
            self._handlers[number] = signal.getsignal(number)
            signal.signal(number, self._interrupted)
        self._links = [self._connect(host) for host in self._request.hosts]
        threading.Thread(target=self._beat, name="zero-launch beat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        links = [*self._links, *self._returning.values()]
        for link in links:
            link.close()
        deadline = time.monotonic() + GRACE
        while any(link.is_connected() for link in links) and time.monotonic() < deadline:
            self._drain()
        for link in links:
            link.kill()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def run(self) -> Outcome:
        """Check the nodes, run the ranks, restart them where that is allowed.

        Raises:
            LaunchError: nodes that cannot take part, all of them in one table; or a wrong configuration.
        """
        try:
            self._check()
            return self._rounds()
        except Stopped as stop:
            self._wind_down(stop.number)
            return Outcome(interrupted=stop.number)

    # -- connections ------------------------------------------------------------------------------

    def _connect(self, host: Host) -> Link:
        return Link(host, self._request.shell, self._wanted, self._events)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            for link in [*self._links, *self._returning.values()]:
                link.send({"do": "beat"})

    def _interrupted(self, number: int, _: FrameType | None) -> None:
        self._signal = self._signal or signal.Signals(number)

    def _wait(self, until: Callable[[], bool], seconds: float = math.inf, winding_down: bool = False) -> bool:
        """Take what comes until the condition holds, which is returned."""
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                return False
            if self._signal is not None and not winding_down:
                raise Stopped(self._signal)
            self._drain()
        return True

    def _drain(self) -> None:
        try:
            self._take(*self._events.get(timeout=TICK))
        except queue.Empty:  # only then do we know what has been heard
            self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        self._console.flush()
        for link in [*self._links, *self._returning.values()]:
            silent = now - link.heard
            if link.lost is not None:
                continue
            if link.hello is None and silent > CONNECT:
                link.lose(f"{self._request.shell.name} does not connect within {CONNECT:.0f} s")
            elif link.facts is None and link.hello is not None and silent > PREPARE:
                link.lose("does not answer")
            elif link.facts is not None and silent > self._request.silence:
                link.lose(f"no sign of life for {self._request.silence:.0f} s: the node or its network is down")

    def _take(self, link: Link, message: Message) -> None:
        kind = message["is"]
        if kind == "hello":
            link.hello = message
            request = self._request
            wanted = {"target": request.target, "module": request.module, "config": request.config}
            overrides = list(request.overrides) if link is self._links[0] else None  # one of them checks
            link.send({"do": "facts", "cpu": request.cpu, "overrides": overrides, **wanted})
        elif kind == "facts":
            link.facts = message
        elif kind == "problem" and link.facts is None:
            link.lose(message["text"])
        elif kind in ("answer", "problem"):
            link.answer = message
        elif kind == "output":
            if link in self._members:
                rank = link.first_rank + message["rank"]
                self._console.feed(rank, message["target"], to_bytes(message["data"]))
        elif kind == "finished":
            link.finished = True
        elif kind == "ended":
            link.ended = message
        elif kind == "gone":
            link.lose(link.why_gone(message["code"]))
        elif kind == "text" and link.facts is not None and not self._over.is_set():
            self._console.say(f"[{link.host.label}] {message['text']}\n")

    def _check(self) -> None:
        """See that the nodes can take part. In an elastic run those that cannot be reached are left out."""
        self._wait(lambda: all(link.facts is not None or link.lost is not None for link in self._links))
        found = {link: self._problems(link) for link in self._links}
        absent = [link for link in self._links if link.hello is None]
        for link in self._links:
            if link.facts is not None and link.facts["config_error"]:
                raise LaunchError(link.facts["config_error"])
        wrong = any(found[link] for link in self._links if link not in absent)
        if wrong or len(self._links) - len(absent) < self._request.least:
            raise preflight.table([problem for problems in found.values() for problem in problems], len(self._links))
        for link in absent:
            self._say(f"{link.host.label} is left out: {link.lost}")
        for link in self._links:
            if warning := preflight.clock_warning(link):
                self._say(warning)

    def _problems(self, link: Link) -> list[preflight.Problem]:
        return preflight.problems(link, versions.installed(), self._request.nproc)

    def _say(self, text: str) -> None:
        self._console.say(f"zero-launch: {text}\n")

    # -- rounds -----------------------------------------------------------------------------------

    def _rounds(self) -> Outcome:
        request, restarts, number = self._request, 0, 0
        while True:
            members = [link for link in self._links if link.lost is None]
            end = self._round(members, number)
            number += 1
            if end.succeeded:
                return Outcome()
            lost = tuple(f"{link.host.label} was lost: {link.lost}{_ranks(link)}" for link in end.lost)
            outcome = Outcome(end.failures, lost=lost)
            if end.failures or (lost and not request.elastic):
                if restarts == request.restarts:
                    return outcome
                restarts += 1
            if outcome.code:
                self._console.say(report(outcome, self._console))
            if not self._assemble():
                return outcome
            names = ", ".join(link.host.label for link in self._links if link.lost is None)
            count = f"restart {restarts} of {request.restarts}" if end.failures or not request.elastic else "going on"
            self._say(f"{count} with {names}")

    def _assemble(self) -> bool:
        """Wait until there are nodes enough for a round."""
        least = self._request.least

        def enough() -> bool:
            self._retry()
            self._return()
            return sum(link.lost is None for link in self._links) >= least

        if not enough():
            self._say(f"waiting {RETURN:.0f} s at most for the nodes that were lost")
        return self._wait(enough, RETURN)

    def _round(self, members: list[Link], number: int) -> Round:
        """Run the ranks once on these nodes."""
        self._prepare(members)
        first = members[0]
        others = [str(link.hello["address"] or link.host.label) for link in members[1:] if link.hello]
        asked = {"do": "listen", "port": self._request.port, "address": self._request.address, "others": others}
        place: Message = {}
        if not self._ask([first], asked):
            return Round(lost=(first,))
        assert first.answer is not None
        place = {key: first.answer[key] for key in ("address", "port")}
        if not self._ask(members[1:], {"do": "reach", **place}):
            return Round(lost=tuple(link for link in members if link.lost))
        world_size = members[-1].ranks.stop
        self._console.assign([f"{link.host.label}:{rank}" for link in members for rank in link.ranks])
        self._members = members
        place |= {"world_size": world_size, "nodes": len(members), "restart": number, "run_id": self._request.run_id}
        for node, link in enumerate(members):
            link.send(self._order(link, {**place, "node": node, "first_rank": link.first_rank}))
        try:
            return self._watch(members)
        finally:
            self._console.flush(everything=True)
            self._members = []

    def _prepare(self, members: Sequence[Link]) -> None:
        rank = 0
        for link in members:
            assert link.facts is not None
            link.first_rank = rank
            link.nproc = self._count(link)
            link.ended, link.finished, link.stopped = None, False, False
            rank += link.nproc

    def _count(self, link: Link) -> int:
        gpus: int = link.facts["gpus"] if link.facts else 0
        return processes(link.host, self._request.nproc) or gpus or CPU_PROCESSES

    def _order(self, link: Link, place: Message) -> Message:
        request, host = self._request, link.host
        environment = dict(request.ranks_environment)
        assert link.facts is not None
        if link.facts["gpus"] and (host.chosen is not None or link.nproc < link.facts["gpus"]):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, (host.chosen or range(link.nproc))[: link.nproc]))
        if request.elastic:
            environment["ZEROENGINE_FULL_WORLD_SIZE"] = str(sum(map(self._count, self._links)))
        return {
            "do": "run",
            "place": place,
            "nproc": link.nproc,
            "host": host.label,
            "target": request.target,
            "arguments": list(request.arguments),
            "module": request.module,
            "environment": environment,
            "bind": request.bind,
        }

    def _ask(self, links: Sequence[Link], message: Message) -> bool:
        """Have all of them do something short; False where a node was lost meanwhile.

        Raises:
            LaunchError: a node that cannot; with what it says.
        """
        for link in links:
            link.answer = None
            link.send(message)
        if not self._wait(lambda: all(link.answer or link.lost for link in links), ANSWER):
            for link in links:
                if not link.answer:
                    link.lose(f"no answer within {ANSWER:.0f} s")
        said = [(link.host.label, link.answer["text"]) for link in links if link.answer and "text" in link.answer]
        if said:
            raise preflight.table(said, len(self._links))
        return all(link.lost is None for link in links)

    def _watch(self, members: Sequence[Link]) -> Round:
        def fell() -> bool:
            return any(link.lost or link.ended for link in members)

        def returns() -> bool:
            self._retry()
            return any(link.facts is not None and not self._problems(link) for link in self._returning.values())

        self._wait(lambda: fell() or all(link.finished for link in members) or returns())
        if not fell() and all(link.finished for link in members):
            for link in members:
                link.send({"do": "release"})
            self._wait(lambda: all(link.ended or link.lost for link in members), END)
            return Round(succeeded=True)
        if fell() and not any(link.lost for link in members):
            self._wait(lambda: any(f.explained for f in _failures(members)) or not self._running(members), HEARING)
        self._wind_down(signal.SIGTERM)
        for link in members:
            if link.ended and link.ended["interrupted"] and not link.stopped and not link.ended["failures"]:
                link.lose("its zero-launch process was stopped from there")
        return Round(False, _failures(members), tuple(link for link in members if link.lost))

    def _running(self, members: Sequence[Link]) -> list[Link]:
        return [link for link in members if not link.ended and not link.lost and not link.finished]

    def _wind_down(self, number: signal.Signals) -> None:
        """End the ranks that still run."""
        running = [link for link in self._members if not link.ended and not link.lost]
        for link in running:
            link.stopped = True
            link.send({"do": "stop", "signal": int(number)})
        if not self._wait(lambda: all(link.ended or link.lost for link in running), END, winding_down=True):
            for link in running:
                if not link.ended:
                    link.lose("its ranks do not end")

    def _retry(self) -> None:
        """Try again to reach nodes that were lost."""
        now = time.monotonic()
        for index, link in enumerate(self._links):
            if link.lost is None or not (self._request.elastic or self._request.restarts):
                continue
            candidate = self._returning.get(index)
            if candidate is None and now > link.lost_at + RETRY:
                link.kill()
                self._returning[index] = self._connect(link.host)
            elif candidate is not None and (candidate.lost or (candidate.facts and self._problems(candidate))):
                candidate.kill()
                link.lost_at = now
                del self._returning[index]

    def _return(self) -> None:
        """Nodes that are back take their places."""
        for index, candidate in list(self._returning.items()):
            if candidate.facts is not None and candidate.lost is None:
                self._links[index] = self._returning.pop(index)
                self._say(f"{candidate.host.label} is back")


def _failures(members: Sequence[Link]) -> tuple[Failure, ...]:
    """Those of all nodes by this machine's clock, the first to fail first."""
    found = [
        Failure(f["rank"], link.ended["at"] - f["age"], f["code"], f["summary"], f["text"], link.host.label)
        for link in members
        if link.ended
        for f in link.ended["failures"]
    ]
    return tuple(sorted(found, key=lambda failure: failure.time))


def _ranks(link: Link) -> str:
    ranks = list(link.ranks)
    return f" (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})" if ranks else ""
