"""Hold the launcher's connections to all nodes of a run, including nodes that are lost and nodes that come back."""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

from zeroengine.errors import LaunchError
from zeroengine.launch.cluster.connections import DESCRIPTORS_PER_CONNECTION, POLL_INTERVAL_S, ConnectionThread
from zeroengine.launch.cluster.hosts import Host
from zeroengine.launch.cluster.node_connection import RETRY_INTERVAL_S, NodeConnection
from zeroengine.launch.cluster.preflight import find_problems, problem_table
from zeroengine.launch.cluster.protocol import Message
from zeroengine.launch.cluster.request import ClusterRequest
from zeroengine.launch.cluster.versions import installed_versions
from zeroengine.launch.local.console import Console
from zeroengine.launch.local.descriptors import allow_descriptors
from zeroengine.launch.local.rank import SIGKILL_TIMEOUT_S
from zeroengine.launch.local.signals import FORWARDED_SIGNALS, STOP_SIGNALS, signal_handlers

# The most messages that are handled before the condition of a wait is tested again.
MAX_EVENTS_PER_TURN = 100
# The seconds that the answer to a short question may take.
ANSWER_TIMEOUT_S = 20.0


class LauncherInterrupted(Exception):
    """The launcher has received a signal that ends the run."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number


class Nodes:
    """The nodes of a run, for a `with` block.

    It connects to many nodes at a time, and at the end of the block no process is left on any of them. All methods
    belong to the launcher's main thread.

    Attributes:
        connections: One per host of the request; for a lost node, the one that was lost.
    """

    def __init__(self, request: ClusterRequest, console: Console) -> None:
        self._request, self._console = request, console
        self._introduction: Message = {"folder": request.folder, "environment": request.environment}
        # These nodes are still to be connected to.
        self._unconnected: deque[NodeConnection] = deque()
        # These are new connections to lost hosts, by the index of the host.
        self._returning: dict[int, NodeConnection] = {}
        # These problems of nodes that came back and cannot take part have been printed.
        self._reported: set[tuple[str, str]] = set()
        self._last_clock_check = 0.0
        self._stop_signal: signal.Signals | None = None
        self._to_forward: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
        self._handlers = contextlib.ExitStack()
        self._run_is_over = False
        self.connections: list[NodeConnection] = []

    def __enter__(self) -> Nodes:
        count = len(self._request.hosts)
        allow_descriptors(DESCRIPTORS_PER_CONNECTION * count, f"{count} nodes")
        self._thread = ConnectionThread()
        # Handlers only note the signal. The loop in `_handle_events` acts on it.
        self._handlers.enter_context(signal_handlers(STOP_SIGNALS, self._note_stop_signal))
        self._handlers.enter_context(signal_handlers(FORWARDED_SIGNALS, self._to_forward.put))
        self.connections = [self._add_connection(host) for host in self._request.hosts]
        self._connect_next()
        return self

    def __exit__(self, *_: object) -> None:
        self._run_is_over = True
        # Nodes that were never connected to need no end.
        self._unconnected.clear()
        nodes = self._all()
        # A node whose connection is closed ends its ranks, and then the connecting process here ends by itself.
        for node in nodes:
            node.close()
        deadline = time.monotonic() + SIGKILL_TIMEOUT_S
        while any(node.is_connected() for node in nodes) and time.monotonic() < deadline:
            self._handle_events()
        # A connecting process that has not ended by now may wait for a network that is down.
        for node in nodes:
            node.kill()
        self._thread.close()
        self._handlers.close()

    def present(self) -> list[NodeConnection]:
        """Return the nodes that are not lost."""
        return [node for node in self.connections if node.loss is None]

    def print_notice(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self._console.print_own(f"zero-launch: {text}\n")

    def wait(self, condition: Callable[[], bool], seconds: float = math.inf, interruptible: bool = True) -> bool:
        """Handle messages until the condition holds or the time is up, and return whether it holds.

        Args:
            condition: Tested after each batch of messages.
            seconds: The longest time to wait.
            interruptible: Whether a signal to the launcher ends the wait.

        Raises:
            LauncherInterrupted: The launcher has received a signal.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            # A handler may run at any line, so it only notes the signal, and the main thread raises here.
            if self._stop_signal is not None and interruptible:
                raise LauncherInterrupted(self._stop_signal)
            self._handle_events()
        return True

    def ask(self, nodes: Sequence[NodeConnection], message: Message) -> dict[NodeConnection, str]:
        """Send the nodes a short task and wait for their answers. A node that does not answer in time is lost.

        Returns:
            The nodes that cannot do it, each with the reason.
        """
        for node in nodes:
            # An answer to an earlier question must not pass for the answer to this one.
            node.answer = None
            node.send(message)
        if not self.wait(lambda: all(node.answer or node.loss for node in nodes), ANSWER_TIMEOUT_S):
            for node in nodes:
                if not node.answer:
                    node.lose(f"no answer within {ANSWER_TIMEOUT_S:.0f} s")
        return {node: node.answer["text"] for node in nodes if node.answer and "text" in node.answer}

    def check(self) -> None:
        """Wait for the nodes and see that they can take part. An elastic run leaves out nodes that do not answer.

        Raises:
            LaunchError: Something is wrong; all problems are in one table.
        """
        self.wait(lambda: all(node.facts is not None or node.loss is not None for node in self.connections))
        # The first node checks the configuration for all of them, so its message needs no table.
        for node in self.connections:
            if node.facts is not None and node.facts["config_error"]:
                raise LaunchError(node.facts["config_error"])
        problems = {node: self._problems(node) for node in self.connections}
        # Absent means that nothing is wrong with the node except that it cannot be reached.
        absent = [
            node
            for node in self.connections
            if node.facts is None and problems[node] == [node.loss] and not node.is_unfit
        ]
        any_wrong = any(problems[node] for node in self.connections if node not in absent)
        # All problems appear in one table, so that a user can correct them together.
        if any_wrong or len(self.connections) - len(absent) < self._request.min_nodes:
            rows = {node.host.label: texts for node, texts in problems.items() if texts}
            raise problem_table(rows, len(self.connections))
        for node in absent:
            self.print_notice(f"{node.host.label} is left out: {node.loss}")

    # -- nodes that come back ---------------------------------------------------------------------

    def reconnect_lost(self) -> bool:
        """Connect to lost nodes again from time to time, and return whether one of them can take part again."""
        if not self._request.takes_nodes_back:
            return False
        now = time.monotonic()
        for index, node in enumerate(self.connections):
            candidate = self._returning.get(index)
            if node.loss is None:
                continue
            if candidate is None and now > node.retry_at:
                # ssh may still wait for a host that no longer answers.
                node.kill()
                self._returning[index] = self._add_connection(node.host)
            elif candidate is not None and (candidate.loss or (candidate.facts and self._problems(candidate))):
                # The same problem appears at every attempt, and is reported once.
                for problem in self._problems(candidate):
                    if candidate.hello is not None and (node.host.label, problem) not in self._reported:
                        self._reported.add((node.host.label, problem))
                        self.print_notice(f"{node.host.label} is back, and cannot take part: {problem}")
                candidate.kill()
                node.retry_after(RETRY_INTERVAL_S)
                del self._returning[index]
        return any(candidate.facts is not None and not candidate.loss for candidate in self._returning.values())

    def end_exclusions(self) -> None:
        """Let excluded nodes come back soon: the run cannot go on without them."""
        for node in self.connections:
            node.retry_after(min(RETRY_INTERVAL_S, node.retry_at - time.monotonic()))

    def take_back(self) -> None:
        """Put the new connections of nodes that are back in the place of the lost ones."""
        for index, candidate in list(self._returning.items()):
            if candidate.facts is not None and candidate.loss is None and not self._problems(candidate):
                self.connections[index] = self._returning.pop(index)
                self.print_notice(f"{candidate.host.label} is back")

    # -- what comes over the connections ----------------------------------------------------------

    def _all(self) -> list[NodeConnection]:
        return [*self.connections, *self._returning.values()]

    def _add_connection(self, host: Host) -> NodeConnection:
        node = NodeConnection(host, self._request.shell, self._introduction, self._thread)
        self._unconnected.append(node)
        return node

    def _connect_next(self) -> None:
        """Connect to waiting nodes, as long as not too many others are being connected to."""
        if self._unconnected:
            num_connecting = sum(node.is_connecting for node in self._all())
            while self._unconnected and num_connecting < self._request.fan_out:
                node = self._unconnected.popleft()
                node.connect()
                num_connecting += node.is_connecting

    def _problems(self, node: NodeConnection) -> list[str]:
        return find_problems(node, installed_versions(), self._request.nproc)

    def _note_stop_signal(self, number: signal.Signals) -> None:
        # The first signal decides how the run ends. A user who presses Ctrl-C twice changes nothing.
        self._stop_signal = self._stop_signal or number

    def _handle_events(self) -> None:
        """Handle the messages that have come, or wait a moment for one; check the clocks, however many there are."""
        while not self._to_forward.empty():
            number, running = self._to_forward.get(), [node for node in self.connections if node.is_running]
            for node in running:
                node.send({"do": "signal", "signal": int(number)})
            if not running:
                self.print_notice(f"{number.name} came while no rank was running, and is forgotten")
        # Only the first message is waited for.
        timeout_s = POLL_INTERVAL_S
        with contextlib.suppress(queue.Empty):
            for _ in range(MAX_EVENTS_PER_TURN):
                owner, message, acknowledge = self._thread.events.get(timeout=timeout_s)
                assert isinstance(owner, NodeConnection)
                self._handle_message(owner, message)
                acknowledge()
                timeout_s = 0.0
        # The clocks are checked even if messages arrive without a pause, or a flood of them would hide a silent node.
        if time.monotonic() > self._last_clock_check + POLL_INTERVAL_S:
            self._console.flush()
            for node in self._all():
                self._lose_if_silent(node)
            self._last_clock_check = time.monotonic()
        self._connect_next()

    def _lose_if_silent(self, node: NodeConnection) -> None:
        """Give the node up if it has been silent for too long."""
        now, request = time.monotonic(), self._request
        connect_s, import_s, silence_s = request.connect_timeout_s, request.import_timeout_s, request.node_timeout_s
        if node.loss is not None or node.connecting_since is None:
            return
        if node.hello is None:
            if now - node.connecting_since > connect_s:
                node.lose(f"{request.shell.name} does not connect within {connect_s:g} s (--connect-timeout)")
        elif node.facts is None:
            if now - node.hello["at"] > import_s:
                node.lose(f"its Python has not imported torch within {import_s:g} s (--import-timeout)")
        elif now - node.last_heard > silence_s:
            node.lose(f"no sign of life for {silence_s:.0f} s: the node or its network is down")

    def _handle_message(self, node: NodeConnection, message: Message) -> None:
        kind = message["is"]
        if kind == "hello":
            node.hello = message
            node.send(self._request.facts_message(first=node is self.connections[0]))
        elif kind == "facts":
            node.facts = message
        elif kind == "problem" and (node.facts is None or node.is_running):
            # A node that says what it lacks would lack it at the next attempt as well.
            node.is_unfit = node.facts is None
            node.lose(message["text"])
        elif kind in ("answer", "problem"):
            node.answer = message
        elif kind == "output" and node.is_running:
            data = message["data"].encode("latin-1")
            self._console.feed(node.first_rank + message["rank"], message["target"], data)
        elif kind == "stepped":
            node.has_stepped = True
        elif kind == "finished":
            node.has_finished = True
        elif kind == "ended":
            node.end_report = message
        elif kind == "gone":
            node.lose(node.describe_end(message["code"]))
        elif kind == "text" and node.facts is not None and not self._run_is_over:
            # Before the facts it is a login script's greeting, which nobody needs.
            self._console.print_own(f"[{node.host.label}] {message['text']}\n")
