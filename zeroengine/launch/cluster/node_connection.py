"""One node as the launcher sees it: what has come over its connection so far."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from pathlib import Path

from zeroengine.launch.cluster import bootstrap
from zeroengine.launch.cluster.connections import Connection, Connections
from zeroengine.launch.cluster.hosts import Host
from zeroengine.launch.cluster.protocol import Message, encode
from zeroengine.launch.cluster.shells import Shell

RETRY = 3.0  # seconds between two attempts to reach a node that was lost


class Link:
    """One node as the launcher sees it. Only the launcher's main thread uses it.

    Attributes:
        began: `time.monotonic` of `connect`; None before.
        lost: why the node is not there any more, in words; None while it is.
        refused: whether it is lost because it lacks something, and not because it does not answer.
        retry_at: `time.monotonic` before which a lost node is not connected to again.
        running: whether its ranks run now.
    """

    def __init__(self, host: Host, shell: Shell, wanted: Message, connections: Connections) -> None:
        self.host = host
        self.began: float | None = None
        self.hello: Message | None = None
        self.facts: Message | None = None
        self.answer: Message | None = None
        self.lost: str | None = None
        self.refused = False
        self.retry_at = 0.0
        self.running = False
        self.begin(0, 0)
        self._shell, self._wanted, self._connections = shell, wanted, connections
        self._connection: Connection | None = None

    @property
    def heard(self) -> float:
        """See `Connection`."""
        return self._connection.heard if self._connection else math.inf

    @property
    def clock(self) -> float:
        """See `Connection`."""
        return self._connection.clock if self._connection else math.inf

    @property
    def is_connecting(self) -> bool:
        return self.began is not None and self.hello is None and self.lost is None

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.nproc)

    def connect(self) -> None:
        """Start the process that connects to the node, and send it what a node begins with."""
        self.began = time.monotonic()
        try:
            self._connection = self._connections.connect(self, self._shell.starter(self.host.name))
        except OSError as error:
            self.lose(f"{self._shell.name} cannot be started: {error.strerror}")
            return
        source = Path(bootstrap.__file__).read_text()
        self._connections.send(self._connection, f"exec({source!r})\n".encode() + encode(self._wanted))

    def begin(self, first_rank: int, nproc: int) -> None:
        """Before a round, in which the node has these ranks."""
        self.first_rank, self.nproc = first_rank, nproc
        self.ended: Message | None = None  # how its ranks ended
        self.stepped = False  # one of them has taken a step
        self.finished = False  # all of them well, and the others are waited for
        self.stopped = False  # told to end them

    def send(self, message: Message) -> None:
        if self.lost is None and self._connection is not None:
            self._connections.send(self._connection, encode(message))

    def taken(self, size: int) -> None:
        """So many bytes of what came over the connection have been dealt with."""
        if self._connection is not None:
            self._connections.taken(self._connection, size)

    def lose(self, why: str) -> None:
        """From now on the node is not there; its end of the connection, if any, will end its ranks."""
        if self.lost is None:
            self.lost = why
            self.retry_after(RETRY)
            if self._connection is not None:
                self._connections.end(self._connection, flush=False)

    def retry_after(self, seconds: float) -> None:
        self.retry_at = time.monotonic() + seconds

    def close(self) -> None:
        """End the connection. The node's side ends what runs there."""
        if self._connection is not None:
            self._connections.end(self._connection)

    def kill(self, patience: float = 0.0) -> None:
        """After `patience` seconds for it to end by itself, end the connecting process."""
        if self._connection is None:
            return
        self.close()
        process = self._connection.process
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._connections.drop(self._connection)

    def is_connected(self) -> bool:
        return self._connection is not None and self._connection.process.poll() is None

    def why_gone(self, code: int) -> str:
        """A sentence about a connection that has ended by itself."""
        said = " / ".join(self._connection.said) if self._connection else ""
        if self.hello is None:
            if code == 127 and self._shell.name == "ssh":
                return f"there is no such Python: {said}"
            return said or f"{self._shell.name} ended with {_ending(code)}"
        return f"its connection ended ({_ending(code)})" + (f": {said}" if said else "")


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
