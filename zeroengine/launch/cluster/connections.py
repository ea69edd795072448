"""The processes through which the launcher reaches its nodes, and the one thread that reads from and writes to all.

[Note: One thread for all connections]
A node costs three descriptors and no thread, so that a thousand of them fit. Nothing here waits for a single node: what
one does not read stays in its outbox. Signs of life are sent from this thread, so that a screen on which the launcher
waits does not make it seem dead. A node that says more than the launcher prints is not read from until that is
printed; all others are, so that a flood from one does not hide the silence of another.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import resource
import selectors
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from zeroengine.errors import LaunchError
from zeroengine.launch.cluster.protocol import BEAT, MARK, Lines, Message, decode, encode

QUOTED = 5  # lines of what ssh said that are kept
LAST_WORDS_S = 1.0  # for what it said at its end to arrive; a process that it leaves behind may keep the pipe open
BACKLOG = 1 << 18  # bytes of one node's messages that may wait for the launcher
OVERHEAD = 100  # bytes that a message counts for besides its own
TICK = 0.1  # seconds between two looks at clocks
CHUNK = 1 << 16
DESCRIPTORS = 3  # of a connection
SPARE_DESCRIPTORS = 100  # for everything else


class Connection:
    """A process such as ssh, its stdin, stdout and stderr. The thread of `Connections` uses the pipes, nobody else.

    Attributes:
        heard: `time.monotonic` of the last sign of life.
        clock: seconds that the node's `time.monotonic` is behind this one's, by the quickest message: one that is on
            its way for long makes it seem to be further behind.
        said: the last lines of its stderr.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, command: Sequence[str], receive: Callable[[Message, int], None]) -> None:
        self.heard, self.clock = time.monotonic(), math.inf
        self.said: deque[str] = deque(maxlen=QUOTED)
        self.process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.input, self.output, self.errors = self.process.stdin, self.process.stdout, self.process.stderr
        for pipe in (self.input, self.output, self.errors):
            os.set_blocking(pipe.fileno(), False)
        self.outbox = bytearray()
        self.closing = False  # stdin is to be closed once the outbox is empty
        self.backlog = 0  # bytes of messages that the launcher has not taken yet
        self.ended_at: float | None = None  # when its stdout ended
        self.lock = threading.Lock()  # of outbox, closing and backlog
        self._receive = receive
        self._lines = {self.output: Lines(), self.errors: Lines()}

    @property
    def is_closed(self) -> bool:
        return self.input.closed and self.output.closed and self.errors.closed

    @property
    def is_full(self) -> bool:
        return self.backlog > BACKLOG

    def taken(self, size: int) -> bool:
        """The launcher has taken a message; returns whether reading can go on, where it was stopped."""
        with self.lock:
            was_full, self.backlog = self.is_full, self.backlog - size
            return was_full and not self.is_full

    def read_output(self, data: bytes) -> None:
        self.heard = time.monotonic()
        for line in self._lines[self.output].feed(data):
            self._read_line(line)

    def read_errors(self, data: bytes) -> None:
        for line in self._lines[self.errors].feed(data):
            if text := line.decode(errors="replace").rstrip():
                self.said.append(text)
                self._hand_on({"is": "text", "text": text}, len(line))

    def finish(self, code: int) -> None:
        """It has ended: what it said last, and that."""
        self.read_errors(b"\n")
        self._hand_on({"is": "gone", "code": code}, 0)

    def flush(self) -> None:
        """Write what can be written now; what nobody reads any more is dropped."""
        with self.lock, contextlib.suppress(BlockingIOError):
            if self.input.closed:
                return
            try:
                while self.outbox:
                    del self.outbox[: os.write(self.input.fileno(), self.outbox[:CHUNK])]
            except BlockingIOError:
                raise
            except OSError:
                self.outbox.clear()
            if self.closing:
                self.input.close()

    def _read_line(self, line: bytes) -> None:
        """A message begins anywhere in a line: what a login script prints may have no end of its own."""
        text, mark, rest = line.partition(MARK)
        try:
            message = decode(rest, "is") if mark else None
        except ValueError:  # something else was printed in the midst of it
            text, message = line, None
        if text.strip():
            self._hand_on({"is": "text", "text": text.decode(errors="replace").rstrip()}, len(text))
        if message is not None:
            if "clock" in message:
                self.clock = min(self.clock, self.heard - message["clock"])
            if message["is"] != "beat":
                message["at"] = self.heard
                self._hand_on(message, len(rest))

    def _hand_on(self, message: Message, size: int) -> None:
        size += OVERHEAD
        with self.lock:
            self.backlog += size
        self._receive(message, size)


class Connections:
    """Reads from and writes to connections, on a thread of its own, until it is closed.

    Attributes:
        events: what has come over them: whose, the message, and how many bytes it had.
    """

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[object, Message, int]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._changed: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._open: set[Connection] = set()
        self._dropped: set[Connection] = set()
        self._wake_reader, self._wake_writer = os.pipe()
        for end in (self._wake_reader, self._wake_writer):
            os.set_blocking(end, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._over = False
        self._thread = threading.Thread(target=self._run, name="zero-launch connections", daemon=True)
        self._thread.start()

    def connect(self, owner: object, command: Sequence[str]) -> Connection:
        """Start the process.

        Args:
            owner: whom `events` names.

        Raises:
            OSError: it cannot be started.
        """
        connection = Connection(command, lambda message, size: self.events.put((owner, message, size)))
        self._change(connection)
        return connection

    def send(self, connection: Connection, data: bytes) -> None:
        with connection.lock:
            if connection.closing:
                return
            connection.outbox += data
        self._change(connection)

    def end(self, connection: Connection, flush: bool = True) -> None:
        """Close its stdin, which ends what runs on the node; after what was sent, or at once."""
        with connection.lock:
            connection.closing = True
            if not flush:
                connection.outbox.clear()
        self._change(connection)

    def taken(self, connection: Connection, size: int) -> None:
        """See `Connection.taken`."""
        if connection.taken(size):
            self._change(connection)

    def drop(self, connection: Connection) -> None:
        """Once its process has been killed: close its pipes, which others may hold open at their end."""
        self._dropped.add(connection)
        self._change(connection)

    def close(self) -> None:
        """End the thread, and close every pipe."""
        self._over = True
        self._wake()
        self._thread.join()
        for connection in list(self._open):
            self._close(connection)
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _change(self, connection: Connection) -> None:
        self._changed.put(connection)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of earlier wake-ups
            os.write(self._wake_writer, b"\n")

    def _run(self) -> None:
        beat = time.monotonic() + BEAT
        while not self._over:
            for key, events in self._selector.select(TICK):
                if key.data is None:
                    os.read(self._wake_reader, CHUNK)
                elif events & selectors.EVENT_WRITE:
                    self._update(key.data)
                elif not key.data.is_full:
                    self._read(key.data, key.fileobj)
            while not self._changed.empty():
                self._update(self._changed.get())
            now = time.monotonic()
            if now >= beat:
                beat = now + BEAT
                self._beat()
            for connection in [one for one in self._open if one.ended_at is not None]:
                self._await_end(connection, now)

    def _update(self, connection: Connection) -> None:
        """After a change, or when it can be written to: write, and wait for what is to be waited for now."""
        if connection in self._dropped:
            self._close(connection)
            return
        if connection.is_closed:
            return
        self._open.add(connection)
        connection.flush()
        if not connection.input.closed:
            self._watch(connection, connection.input, selectors.EVENT_WRITE if connection.outbox else 0)
        for pipe in (connection.output, connection.errors):
            if not pipe.closed:
                self._watch(connection, pipe, 0 if connection.is_full else selectors.EVENT_READ)

    def _watch(self, connection: Connection, pipe: object, events: int) -> None:
        watched = self._selector.get_map().get(pipe)  # type: ignore[call-overload]
        if watched is None and events:
            self._selector.register(pipe, events, connection)  # type: ignore[arg-type]
        elif watched is not None and not events:
            self._selector.unregister(pipe)  # type: ignore[arg-type]

    def _read(self, connection: Connection, pipe: object) -> None:
        try:
            data = os.read(pipe.fileno(), CHUNK)  # type: ignore[attr-defined]
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if pipe is connection.output:
            if data:
                connection.read_output(data)
            else:
                connection.read_output(b"\n")
                connection.ended_at = time.monotonic()
        elif data:
            connection.read_errors(data)
        if not data:
            self._watch(connection, pipe, 0)
            pipe.close()  # type: ignore[attr-defined]
        if connection.is_full:
            self._update(connection)

    def _await_end(self, connection: Connection, now: float) -> None:
        """Its stdout has ended: hand on how, once the process and its stderr have ended as well."""
        code = connection.process.poll()
        assert connection.ended_at is not None
        if code is not None and (connection.errors.closed or now > connection.ended_at + LAST_WORDS_S):
            self._close(connection)
            connection.finish(code)

    def _close(self, connection: Connection) -> None:
        self._dropped.discard(connection)
        self._open.discard(connection)
        for pipe in (connection.input, connection.output, connection.errors):
            if not pipe.closed:
                self._watch(connection, pipe, 0)
                pipe.close()

    def _beat(self) -> None:
        now = time.monotonic()
        for connection in list(self._open):
            if connection.is_full:
                connection.heard = now  # more of it is there to be read
            with connection.lock:
                if not connection.outbox and not connection.closing:  # not on top of what it does not read
                    connection.outbox += encode({"do": "beat"})
            self._update(connection)


def allow_descriptors(count: int, what: str) -> None:
    """Raise this process's limit of open files, if need be, to `count` more than a process needs anyway.

    Raises:
        LaunchError: so many are not allowed; `what` says for what they are.
    """
    wanted = count + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    enough = hard == resource.RLIM_INFINITY or hard >= wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard if enough else wanted))
    except (OSError, ValueError):  # only root may raise the hard limit
        raise LaunchError(
            f"{what} need {wanted} open files, and {hard} are allowed here. Allow more (ulimit -n {wanted}, or nofile "
            "in /etc/security/limits.conf), or start fewer"
        ) from None
