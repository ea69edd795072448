"""One node as the launcher sees it: what has come over its connection so far."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from pathlib import Path

from zeroengine.launch.cluster import bootstrap
from zeroengine.launch.cluster.connections import ConnectionProcess, ConnectionThread
from zeroengine.launch.cluster.hosts import Host
from zeroengine.launch.cluster.protocol import Message, encode
from zeroengine.launch.cluster.shells import RemoteShell

# The seconds between two attempts to reach a lost node.
RETRY_INTERVAL_S = 3.0


class NodeConnection:
    """One node as the launcher sees it. Only the launcher's main thread uses it.

    Args:
        host: The node's host.
        shell: The program that reaches it.
        introduction: The first message to the node: its folder and environment.
        connections: The thread that reads and writes.

    Attributes:
        connecting_since: `time.monotonic` of `connect`; None before.
        hello: The node's first message, from bootstrap.py; None before it has come.
        facts: The node's answer about itself; None before.
        answer: The node's answer to the last short question; None before.
        loss: Why the node is lost, in words; None while it is not.
        is_unfit: Whether it is lost because it lacks something, and not because it does not answer.
        retry_at: `time.monotonic` before which a lost node is not connected to again.
        is_running: Whether its ranks run now.
        end_report: How the node's ranks ended in this round; None before.
        has_stepped: Whether one of the ranks has taken a step in this round.
        has_finished: Whether all ranks of the node have succeeded and wait for those of the other nodes.
        was_stopped: Whether the launcher has told the node to end its ranks.
    """

    def __init__(self, host: Host, shell: RemoteShell, introduction: Message, connections: ConnectionThread) -> None:
        self.host = host
        self.connecting_since: float | None = None
        self.hello: Message | None = None
        self.facts: Message | None = None
        self.answer: Message | None = None
        self.loss: str | None = None
        self.is_unfit = False
        self.retry_at = 0.0
        self.is_running = False
        self.assign_ranks(0, 0)
        self._shell, self._introduction, self._connections = shell, introduction, connections
        self._connection: ConnectionProcess | None = None

    @property
    def last_heard(self) -> float:
        """See `ConnectionProcess`."""
        return self._connection.last_heard if self._connection else math.inf

    @property
    def clock_offset_s(self) -> float:
        """See `ConnectionProcess`."""
        return self._connection.clock_offset_s if self._connection else math.inf

    @property
    def is_connecting(self) -> bool:
        """Whether the node is being connected to and has not answered yet."""
        return self.connecting_since is not None and self.hello is None and self.loss is None

    @property
    def ranks(self) -> range:
        """The ranks of the node in this round."""
        return range(self.first_rank, self.first_rank + self.nproc)

    def connect(self) -> None:
        """Start the process that connects to the node, and send it the node's first program."""
        self.connecting_since = time.monotonic()
        try:
            self._connection = self._connections.connect(self, self._shell.starter(self.host.name))
        except OSError as error:
            self.lose(f"{self._shell.name} cannot be started: {error.strerror}")
            return
        # STARTER, the program on ssh's command line, executes one line and leaves the rest to what that line starts.
        source = Path(bootstrap.__file__).read_text()
        self._connection.send(f"exec({source!r})\n".encode() + encode(self._introduction))

    def assign_ranks(self, first_rank: int, nproc: int) -> None:
        """Begin a round, in which the node has these ranks."""
        self.first_rank, self.nproc = first_rank, nproc
        self.end_report: Message | None = None
        self.has_stepped = self.has_finished = self.was_stopped = False

    def send(self, message: Message) -> None:
        """Send the node a message, unless it is lost."""
        if self.loss is None and self._connection is not None:
            self._connection.send(encode(message))

    def lose(self, reason: str) -> None:
        """Give the node up. If it still runs, it ends its ranks when its connection ends."""
        if self.loss is None:
            self.loss = reason
            self.retry_after(RETRY_INTERVAL_S)
            if self._connection is not None:
                # A node that is given up may never read what is still to be sent.
                self._connection.end(flush=False)

    def retry_after(self, seconds: float) -> None:
        """Do not connect to the lost node again within these seconds."""
        self.retry_at = time.monotonic() + seconds

    def close(self) -> None:
        """End the connection. The node's side ends its ranks."""
        if self._connection is not None:
            self._connection.end()

    def kill(self) -> None:
        """End the connecting process, by force if it has not ended by itself."""
        if self._connection is None:
            return
        self.close()
        process = self._connection.process
        try:
            process.wait(0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._connection.drop()

    def is_connected(self) -> bool:
        """Return whether the connecting process runs."""
        return self._connection is not None and self._connection.process.poll() is None

    def describe_end(self, code: int) -> str:
        """Return a sentence about a connection that has ended by itself.

        Args:
            code: The exit code of the connecting process; negative for a signal.
        """
        errors = " / ".join(self._connection.last_errors) if self._connection else ""
        if self.hello is None:
            # A shell exits with 127 if there is no such program.
            if code == 127 and self._shell.name == "ssh":
                return f"there is no such Python: {errors}"
            return errors or f"{self._shell.name} ended with {_describe_code(code)}"
        return f"its connection ended ({_describe_code(code)})" + (f": {errors}" if errors else "")


def _describe_code(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
