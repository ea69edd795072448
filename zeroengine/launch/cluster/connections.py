"""The processes through which the launcher reaches its nodes, and the one thread that reads from and writes to all.

[Note: One thread for all connections]
A node costs three descriptors and no thread, so that a thousand nodes fit. The thread never waits for a single node:
what a node does not read stays in its outbox. The thread also sends the heartbeats, so that a launcher which waits for
a slow screen does not seem dead. If a node's output comes faster than the launcher prints it, the thread stops reading
from that node until the output is printed. All other nodes are still read from, so that a flood from one node does not
hide the silence of another.
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
from zeroengine.launch.cluster.protocol import (
    HEARTBEAT_INTERVAL_S,
    MESSAGE_PREFIX,
    LineSplitter,
    Message,
    decode,
    encode,
)

# So many lines of ssh's stderr are kept.
MAX_ERROR_LINES = 5
# How long stderr may arrive after stdout has ended. A process that ssh leaves behind may keep the pipe open.
STDERR_TIMEOUT_S = 1.0
# So many bytes of one node's messages may wait for the launcher before reading stops.
MAX_BACKLOG_BYTES = 1 << 18
# Each message takes so much memory besides its own bytes.
MESSAGE_OVERHEAD_BYTES = 100
POLL_INTERVAL_S = 0.1
READ_BYTES = 1 << 16
DESCRIPTORS_PER_CONNECTION = 3
# So many descriptors stay free for everything else in the launcher.
SPARE_DESCRIPTORS = 100


class ConnectionProcess:
    """A process such as ssh, with its stdin, stdout and stderr. Only `ConnectionThread` uses the pipes.

    Args:
        command: The command.
        receive: Called on the connections' thread with each message and its size in bytes.

    Attributes:
        last_heard: `time.monotonic` of the last output.
        clock_offset_s: Seconds to add to the node's `time.monotonic` for this machine's. The smallest offset of all
            messages counts: a message that is delayed makes the offset seem larger.
        last_errors: The last lines of its stderr.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, command: Sequence[str], receive: Callable[[Message, int], None]) -> None:
        self.last_heard, self.clock_offset_s = time.monotonic(), math.inf
        self.last_errors: deque[str] = deque(maxlen=MAX_ERROR_LINES)
        self.process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C must reach the launcher alone, which then ends the nodes in order.
            start_new_session=True,
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.input, self.output, self.errors = self.process.stdin, self.process.stdout, self.process.stderr
        # A node that neither reads nor writes must not block the thread.
        for pipe in (self.input, self.output, self.errors):
            os.set_blocking(pipe.fileno(), False)
        self.outbox = bytearray()
        # Once this is set, stdin is closed as soon as the outbox is empty.
        self.closing = False
        # Count the bytes of messages that the launcher has not handled yet.
        self.backlog_bytes = 0
        self.output_ended_at: float | None = None
        # The lock guards `outbox`, `closing` and `backlog_bytes`, which several threads change.
        self.lock = threading.Lock()
        self._receive = receive
        self._lines = {self.output: LineSplitter(), self.errors: LineSplitter()}

    @property
    def is_closed(self) -> bool:
        """Whether all three pipes are closed."""
        return self.input.closed and self.output.closed and self.errors.closed

    @property
    def is_full(self) -> bool:
        """Whether the launcher must handle messages before more are read."""
        return self.backlog_bytes > MAX_BACKLOG_BYTES

    def acknowledge(self, nbytes: int) -> bool:
        """Record that the launcher has handled a message, and return whether reading can start again."""
        with self.lock:
            # Reading was stopped at the limit. It starts again only when the backlog falls below it.
            was_full, self.backlog_bytes = self.is_full, self.backlog_bytes - nbytes
            return was_full and not self.is_full

    def read_output(self, data: bytes) -> None:
        """Take in new data of stdout."""
        # Any output shows that the node lives, whatever it says.
        self.last_heard = time.monotonic()
        for line in self._lines[self.output].feed(data):
            self._read_line(line)

    def read_errors(self, data: bytes) -> None:
        """Take in new data of stderr."""
        for line in self._lines[self.errors].feed(data):
            if text := line.decode(errors="replace").rstrip():
                self.last_errors.append(text)
                self._hand_on({"is": "text", "text": text}, len(line))

    def finish(self, code: int) -> None:
        """Hand on the last line of stderr, and that the process has ended."""
        # The line end completes a last line that had none.
        self.read_errors(b"\n")
        self._hand_on({"is": "gone", "code": code}, 0)

    def flush(self) -> None:
        """Write as much of the outbox as possible now; drop it if nobody reads any more."""
        with self.lock, contextlib.suppress(BlockingIOError):
            if self.input.closed:
                return
            try:
                while self.outbox:
                    del self.outbox[: os.write(self.input.fileno(), self.outbox[:READ_BYTES])]
            except BlockingIOError:
                # The pipe is full. The rest stays in the outbox.
                raise
            except OSError:
                # The process has closed its stdin or ended.
                self.outbox.clear()
            if self.closing:
                self.input.close()

    def _read_line(self, line: bytes) -> None:
        """Hand on a message, and separately any text before it: a login script may print without a line's end."""
        text, prefix, rest = line.partition(MESSAGE_PREFIX)
        try:
            message = decode(rest, "is") if prefix else None
        except ValueError:
            # Something else was printed in the middle of it.
            text, message = line, None
        if text.strip():
            self._hand_on({"is": "text", "text": text.decode(errors="replace").rstrip()}, len(text))
        if message is not None:
            if "clock" in message:
                # A message that travelled faster gives a better estimate of the difference between the clocks.
                self.clock_offset_s = min(self.clock_offset_s, self.last_heard - message["clock"])
            # A heartbeat has done its work once its time was noted.
            if message["is"] != "beat":
                message["at"] = self.last_heard
                self._hand_on(message, len(rest))

    def _hand_on(self, message: Message, nbytes: int) -> None:
        nbytes += MESSAGE_OVERHEAD_BYTES
        with self.lock:
            self.backlog_bytes += nbytes
        self._receive(message, nbytes)


class ConnectionThread:
    """Read from and write to all connections on one thread, until it is closed. See the note above.

    Attributes:
        events: What has come over the connections: the owner, the message, and its size in bytes.
    """

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[object, Message, int]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._changed: queue.SimpleQueue[ConnectionProcess] = queue.SimpleQueue()
        self._open: set[ConnectionProcess] = set()
        self._dropped: set[ConnectionProcess] = set()
        # Other threads write to this pipe so that the selector returns.
        self._wake_reader, self._wake_writer = os.pipe()
        for end in (self._wake_reader, self._wake_writer):
            os.set_blocking(end, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._closed = False
        # The thread is a daemon, so a launcher that fails elsewhere can still exit.
        self._thread = threading.Thread(target=self._run, name="zero-launch connections", daemon=True)
        self._thread.start()

    def connect(self, owner: object, command: Sequence[str]) -> ConnectionProcess:
        """Start a process and read from it.

        Args:
            owner: The owner that `events` names.
            command: The command.

        Raises:
            OSError: The process cannot be started.
        """
        connection = ConnectionProcess(command, lambda message, nbytes: self.events.put((owner, message, nbytes)))
        self._change(connection)
        return connection

    def send(self, connection: ConnectionProcess, data: bytes) -> None:
        """Write to the process's stdin, as soon as it reads. Never waits."""
        with connection.lock:
            # Nothing may follow the end of the messages, as stdin is closed behind it.
            if connection.closing:
                return
            connection.outbox += data
        self._change(connection)

    def end(self, connection: ConnectionProcess, flush: bool = True) -> None:
        """Close the process's stdin, which ends what runs on the node.

        Args:
            connection: The process.
            flush: Whether to write first what was sent before.
        """
        with connection.lock:
            connection.closing = True
            if not flush:
                connection.outbox.clear()
        self._change(connection)

    def acknowledge(self, connection: ConnectionProcess, nbytes: int) -> None:
        """Record that the launcher has handled a message of so many bytes."""
        if connection.acknowledge(nbytes):
            self._change(connection)

    def drop(self, connection: ConnectionProcess) -> None:
        """Close the pipes of a process that was killed; other processes may hold their far ends open."""
        self._dropped.add(connection)
        self._change(connection)

    def close(self) -> None:
        """End the thread and close every pipe."""
        # The thread sees this at its next turn, and the wake-up makes that turn come at once.
        self._closed = True
        self._wake()
        self._thread.join()
        for connection in list(self._open):
            self._close(connection)
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _change(self, connection: ConnectionProcess) -> None:
        self._changed.put(connection)
        self._wake()

    def _wake(self) -> None:
        # A full pipe holds earlier wake-ups, and one is enough.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"\n")

    def _run(self) -> None:
        next_heartbeat = time.monotonic() + HEARTBEAT_INTERVAL_S
        while not self._closed:
            for key, events in self._selector.select(POLL_INTERVAL_S):
                if key.data is None:
                    os.read(self._wake_reader, READ_BYTES)
                elif events & selectors.EVENT_WRITE:
                    self._update(key.data)
                # The backlog may have become full since `_watch`, through the other pipe of the same process.
                elif not key.data.is_full:
                    self._read(key.data, key.fileobj)
            # All changes are made on this thread, since selectors must not be changed while another thread waits in
            # them.
            while not self._changed.empty():
                self._update(self._changed.get())
            now = time.monotonic()
            if now >= next_heartbeat:
                next_heartbeat = now + HEARTBEAT_INTERVAL_S
                self._send_heartbeats()
            for connection in [c for c in self._open if c.output_ended_at is not None]:
                self._finish_if_ended(connection, now)

    def _update(self, connection: ConnectionProcess) -> None:
        """Write what can be written, and select the pipes that matter now."""
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

    def _watch(self, connection: ConnectionProcess, pipe: object, events: int) -> None:
        # A readable or closed pipe that nobody reads must not be selected: select would always return at once.
        watched = self._selector.get_map().get(pipe)  # type: ignore[call-overload]
        if watched is None and events:
            self._selector.register(pipe, events, connection)  # type: ignore[arg-type]
        elif watched is not None and not events:
            self._selector.unregister(pipe)  # type: ignore[arg-type]

    def _read(self, connection: ConnectionProcess, pipe: object) -> None:
        try:
            data = os.read(pipe.fileno(), READ_BYTES)  # type: ignore[attr-defined]
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if pipe is connection.output:
            if data:
                connection.read_output(data)
            else:
                # The process may live on without a stdout. `_finish_if_ended` waits for its end and for stderr.
                connection.read_output(b"\n")
                connection.output_ended_at = time.monotonic()
        elif data:
            connection.read_errors(data)
        if not data:
            self._watch(connection, pipe, 0)
            pipe.close()  # type: ignore[attr-defined]
        if connection.is_full:
            self._update(connection)

    def _finish_if_ended(self, connection: ConnectionProcess, now: float) -> None:
        """Report the end of a process whose stdout has ended, once the process and its stderr have ended as well."""
        code = connection.process.poll()
        # The exit code may be there before the last line of stderr, which often says why the connection failed.
        assert connection.output_ended_at is not None
        errors_are_complete = connection.errors.closed or now > connection.output_ended_at + STDERR_TIMEOUT_S
        if code is not None and errors_are_complete:
            self._close(connection)
            connection.finish(code)

    def _close(self, connection: ConnectionProcess) -> None:
        self._dropped.discard(connection)
        self._open.discard(connection)
        for pipe in (connection.input, connection.output, connection.errors):
            if not pipe.closed:
                self._watch(connection, pipe, 0)
                pipe.close()

    def _send_heartbeats(self) -> None:
        now = time.monotonic()
        for connection in list(self._open):
            if connection.is_full:
                # More output is waiting to be read, so the node is alive.
                connection.last_heard = now
            with connection.lock:
                # A heartbeat behind data that the node does not read would only add to them.
                if not connection.outbox and not connection.closing:
                    connection.outbox += encode({"do": "beat"})
            self._update(connection)


def allow_descriptors(count: int, purpose: str) -> None:
    """Raise this process's limit of open files, if necessary, to `count` more than it needs anyway.

    Args:
        count: The number of further files.
        purpose: What they are for, in words for the message.

    Raises:
        LaunchError: The system does not allow so many.
    """
    wanted = count + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    hard_is_enough = hard == resource.RLIM_INFINITY or hard >= wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard if hard_is_enough else wanted))
    except (OSError, ValueError):
        # Only root may raise the hard limit.
        raise LaunchError(
            f"{purpose} need {wanted} open files, and {hard} are allowed here. Allow more (ulimit -n {wanted}, or "
            "nofile in /etc/security/limits.conf), or start fewer"
        ) from None
