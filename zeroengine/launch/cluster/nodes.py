"""The launcher's connections to the nodes of a run, lost ones and those that come back included."""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType

from zeroengine.errors import LaunchError
from zeroengine.launch.cluster import preflight, versions
from zeroengine.launch.cluster.connections import DESCRIPTORS, TICK, Connections, allow_descriptors
from zeroengine.launch.cluster.hosts import Host
from zeroengine.launch.cluster.node_connection import RETRY, Link
from zeroengine.launch.cluster.protocol import Message, to_bytes
from zeroengine.launch.cluster.request import Request
from zeroengine.launch.local import signals
from zeroengine.launch.local.console import Console
from zeroengine.launch.local.rank import GRACE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
MANY = 100  # events that are taken between two looks at what is waited for
ANSWER = 20.0  # seconds for a short answer


class Stopped(Exception):
    """The launcher got a signal."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number


class Fleet:
    """The nodes, for a `with` block: connects to them, many at a time, and at its end leaves nothing there.

    Attributes:
        links: one for each host of the request; of a lost node, what is known about it.
    """

    def __init__(self, request: Request, console: Console) -> None:
        self._request, self._console = request, console
        self._wanted: Message = {"folder": request.folder, "environment": request.environment}
        self._waiting: deque[Link] = deque()  # that are still to be connected to
        self._looked = 0.0  # when the clocks were looked at last
        self._signal: signal.Signals | None = None
        self._returning: dict[int, Link] = {}  # new connections to hosts that were lost
        self._told: set[preflight.Problem] = set()  # of nodes that came back
        self._handlers: dict[int, signal._HANDLER] = {}
        self._over = False
        self._to_pass_on: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
        self._passing_on = contextlib.ExitStack()
        self.links: list[Link] = []

    def __enter__(self) -> Fleet:
        count = len(self._request.hosts)
        allow_descriptors(DESCRIPTORS * count, f"{count} nodes")
        self._connections = Connections()
        for number in SIGNALS:
            self._handlers[number] = signal.getsignal(number)
            signal.signal(number, self._interrupted)
        self._passing_on.enter_context(signals.passed_on(self._to_pass_on.put))
        self.links = [self._connect(host) for host in self._request.hosts]
        self._connect_waiting()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._waiting.clear()
        links = self._all()
        for link in links:
            link.close()
        deadline = time.monotonic() + GRACE
        while any(link.is_connected() for link in links) and time.monotonic() < deadline:
            self._drain()
        for link in links:
            link.kill()
        self._connections.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._passing_on.close()

    def present(self) -> list[Link]:
        return [link for link in self.links if link.lost is None]

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._console.say(f"zero-launch: {text}\n")

    def wait(self, until: Callable[[], bool], seconds: float = math.inf, stoppable: bool = True) -> bool:
        """Take what comes until the condition holds or the time is up; returns which.

        Raises:
            Stopped: where that is wanted.
        """
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                return False
            if self._signal is not None and stoppable:
                raise Stopped(self._signal)
            self._drain()
        return True

    def ask(self, links: Sequence[Link], message: Message) -> dict[Link, str]:
        """Have all of them do something short; returns those that cannot, each with what it says.

        A node that does not answer in time is lost.
        """
        for link in links:
            link.answer = None
            link.send(message)
        if not self.wait(lambda: all(link.answer or link.lost for link in links), ANSWER):
            for link in links:
                if not link.answer:
                    link.lose(f"no answer within {ANSWER:.0f} s")
        return {link: link.answer["text"] for link in links if link.answer and "text" in link.answer}

    def check(self) -> None:
        """See that the nodes can take part. In an elastic run those that do not answer are left out.

        Raises:
            LaunchError: all that is wrong, in one table.
        """
        self.wait(lambda: all(link.facts is not None or link.lost is not None for link in self.links))
        for link in self.links:
            if link.facts is not None and link.facts["config_error"]:
                raise LaunchError(link.facts["config_error"])
        found = {link: self._problems(link) for link in self.links}
        absent = [link for link in self.links if link.facts is None and found[link] == [(link.host.label, link.lost)]]
        absent = [link for link in absent if not link.refused]
        wrong = any(found[link] for link in self.links if link not in absent)
        if wrong or len(self.links) - len(absent) < self._request.least:
            raise preflight.table([problem for problems in found.values() for problem in problems], len(self.links))
        for link in absent:
            self.say(f"{link.host.label} is left out: {link.lost}")
        for link in self.links:
            if warning := preflight.clock_warning(link):
                self.say(warning)

    # -- nodes that come back ---------------------------------------------------------------------

    def look_for_lost(self) -> bool:
        """Try to reach nodes that were lost, now and then; whether one of them can take part again."""
        if not self._request.returns:
            return False
        now = time.monotonic()
        for index, link in enumerate(self.links):
            candidate = self._returning.get(index)
            if link.lost is None:
                continue
            if candidate is None and now > link.retry_at:
                link.kill()
                self._returning[index] = self._connect(link.host)
            elif candidate is not None and (candidate.lost or (candidate.facts and self._problems(candidate))):
                for problem in self._problems(candidate):
                    if candidate.hello is not None and problem not in self._told:
                        self._told.add(problem)
                        self.say(f"{problem[0]} is back, and cannot take part: {problem[1]}")
                candidate.kill()
                link.retry_after(RETRY)
                del self._returning[index]
        return any(candidate.facts is not None and not candidate.lost for candidate in self._returning.values())

    def retry_now(self) -> None:
        """Nodes that were put aside may come back: the run cannot go on without them."""
        for link in self.links:
            link.retry_after(min(RETRY, link.retry_at - time.monotonic()))

    def take_back(self) -> None:
        """Nodes that are back take their places."""
        for index, candidate in list(self._returning.items()):
            if candidate.facts is not None and candidate.lost is None and not self._problems(candidate):
                self.links[index] = self._returning.pop(index)
                self.say(f"{candidate.host.label} is back")

    # -- what comes over the connections ----------------------------------------------------------

    def _all(self) -> list[Link]:
        return [*self.links, *self._returning.values()]

    def _connect(self, host: Host) -> Link:
        link = Link(host, self._request.shell, self._wanted, self._connections)
        self._waiting.append(link)
        return link

    def _connect_waiting(self) -> None:
        """Connect to those that wait for it, while not too many others are being connected to."""
        if self._waiting:
            connecting = sum(link.is_connecting for link in self._all())
            while self._waiting and connecting < self._request.fan_out:
                link = self._waiting.popleft()
                link.connect()
                connecting += link.is_connecting

    def _problems(self, link: Link) -> list[preflight.Problem]:
        return preflight.problems(link, versions.installed(), self._request.nproc)

    def _interrupted(self, number: int, _: FrameType | None) -> None:
        self._signal = self._signal or signal.Signals(number)

    def _drain(self) -> None:
        """Take what has come, or wait a moment for it; look at the clocks now and then, however much comes."""
        while not self._to_pass_on.empty():
            number, running = self._to_pass_on.get(), [link for link in self.links if link.running]
            for link in running:
                link.send({"do": "signal", "signal": int(number)})
            if not running:
                self.say(f"{number.name} came while no rank was running, and is forgotten")
        timeout: float | None = TICK
        try:
            for _ in range(MANY):
                owner, message, size = self._connections.events.get(timeout is not None, timeout)
                assert isinstance(owner, Link)
                self._take(owner, message)
                owner.taken(size)
                timeout = None
        except queue.Empty:
            pass
        if time.monotonic() > self._looked + TICK:
            self._console.flush()
            for link in self._all():
                self._listen_for(link)
            self._looked = time.monotonic()
        self._connect_waiting()

    def _listen_for(self, link: Link) -> None:
        """Give the node up if it has been silent for too long."""
        now, request = time.monotonic(), self._request
        silence, connect, prepare = request.silence, request.connect_timeout, request.import_timeout
        if link.lost is not None or link.began is None:
            return
        if link.hello is None:
            if now - link.began > connect:
                link.lose(f"{request.shell.name} does not connect within {connect:g} s (--connect-timeout)")
        elif link.facts is None:
            if now - link.hello["at"] > prepare:
                link.lose(f"its Python has not imported torch within {prepare:g} s (--import-timeout)")
        elif now - link.heard > silence:
            link.lose(f"no sign of life for {silence:.0f} s: the node or its network is down")

    def _take(self, link: Link, message: Message) -> None:
        kind = message["is"]
        if kind == "hello":
            link.hello = message
            link.send(self._request.facts(first=link is self.links[0]))
        elif kind == "facts":
            link.facts = message
        elif kind == "problem" and (link.facts is None or link.running):
            link.refused = link.facts is None
            link.lose(message["text"])
        elif kind in ("answer", "problem"):
            link.answer = message
        elif kind == "output" and link.running:
            self._console.feed(link.first_rank + message["rank"], message["target"], to_bytes(message["data"]))
        elif kind == "stepped":
            link.stepped = True
        elif kind == "finished":
            link.finished = True
        elif kind == "ended":
            link.ended = message
        elif kind == "gone":
            link.lose(link.why_gone(message["code"]))
        elif kind == "text" and link.facts is not None and not self._over:
            self._console.say(f"[{link.host.label}] {message['text']}\n")
