"""The processes through which the launcher reaches its nodes, and the one thread that reads from and writes to all.

[Note: One thread for all connections]
A node costs three descriptors and no thread, so that a thousand nodes fit: the thread runs an asyncio loop. It never
waits for a single node: what a node does not read stays in its buffer. The thread also sends the heartbeats, so that a
launcher which waits for a slow screen does not seem dead. If a node's output comes faster than the launcher prints it,
the thread stops reading from that node until the output is printed. All other nodes are still read from, so that a
flood from one node does not hide the silence of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

from zeroengine.launch.cluster import protocol
from zeroengine.launch.cluster.protocol import Message

# The last lines of ssh's stderr that are kept.
MAX_ERROR_LINES = 5
# How long stderr may arrive after the process has ended. A process that ssh leaves behind may keep the pipe open.
STDERR_TIMEOUT_S = 1.0
# The bytes of one node's messages that may wait for the launcher before reading stops.
MAX_BACKLOG_BYTES = 1 << 18
# The memory of a message in addition to its own bytes.
MESSAGE_OVERHEAD_BYTES = 100
POLL_INTERVAL_S = 0.1
READ_BYTES = 1 << 16
DESCRIPTORS_PER_CONNECTION = 3

Receive = Callable[[Message, Callable[[], None]], None]


class ConnectionProcess:
    """A process such as ssh, with its stdin, stdout and stderr. `ConnectionThread.connect` starts it.

    `open`, `send_heartbeat` and most private methods run on the connections' thread, the others on the launcher's.

    Args:
        command: The command.
        loop: The loop of the connections' thread.
        receive: Called on that thread with each message, and a function to call when it has been handled.

    Attributes:
        last_heard: `time.monotonic` of the last output.
        clock_offset_s: Seconds to add to the node's `time.monotonic` for this machine's. The smallest offset of all
            messages counts: a message that is delayed makes the offset seem larger.
        last_errors: The last lines of its stderr.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, command: Sequence[str], loop: asyncio.AbstractEventLoop, receive: Receive) -> None:
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
        self._loop, self._receive = loop, receive
        # Count the bytes of messages that the launcher has not handled yet. The lock guards the count.
        self._backlog_bytes, self._lock = 0, threading.Lock()
        self._backlog_shrank = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether the launcher must handle messages before more are read."""
        return self._backlog_bytes > MAX_BACKLOG_BYTES

    def send(self, data: bytes) -> None:
        """Write to the process's stdin, as soon as it reads. Never waits."""
        self._loop.call_soon_threadsafe(self._write, data)

    def end(self, flush: bool = True) -> None:
        """Close the process's stdin, which ends what runs on the node.

        Args:
            flush: Whether to write first what was sent before.
        """
        self._loop.call_soon_threadsafe(self._input.close if flush else self._abort_input)

    def drop(self) -> None:
        """Close the pipes of a process that was killed; other processes may hold their far ends open."""
        self._loop.call_soon_threadsafe(self._task.cancel)

    async def open(self, connections: set[ConnectionProcess]) -> None:
        """Begin to read and write, as one of the open connections."""
        # This transport is complete before anything can be sent.
        self._input, _ = await self._loop.connect_write_pipe(asyncio.BaseProtocol, self.process.stdin)
        connections.add(self)
        self._task = self._loop.create_task(self._serve())
        self._task.add_done_callback(lambda _: connections.discard(self))

    def send_heartbeat(self) -> None:
        """Send a heartbeat, unless other data wait to be written."""
        if self.is_full:
            # More output is waiting to be read, so the node is alive.
            self.last_heard = time.monotonic()
        # If the node does not read, a heartbeat would only add to the waiting data.
        if not self._input.get_write_buffer_size():
            self._write(protocol.encode({"do": "beat"}))

    async def _serve(self) -> None:
        """Read until the process has ended, and hand on its exit code."""
        assert self.process.stdout and self.process.stderr
        errors = self._loop.create_task(self._read_lines(self.process.stderr, self._take_error))
        try:
            await self._read_lines(self.process.stdout, self._take_line)
            # The process may live on without a stdout.
            while (code := self.process.poll()) is None:
                await asyncio.sleep(POLL_INTERVAL_S)
            # The exit code may be there before the last line of stderr, which often says why the connection failed.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(errors, STDERR_TIMEOUT_S)
            self._hand_on({"is": "gone", "code": code}, 0)
        finally:
            errors.cancel()
            self._abort_input()

    async def _read_lines(self, pipe: IO[bytes], take_line: Callable[[bytes], None]) -> None:
        reader, lines = asyncio.StreamReader(), protocol.LineSplitter()
        transport, _ = await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while data := await reader.read(READ_BYTES):
                # Any output shows that the node lives, whatever it says.
                self.last_heard = time.monotonic()
                for line in lines.feed(data):
                    take_line(line)
                while self.is_full:
                    self._backlog_shrank.clear()
                    await self._backlog_shrank.wait()
        finally:
            transport.close()
            # The line end completes a last line that had none.
            for line in lines.feed(b"\n"):
                take_line(line)

    def _take_error(self, line: bytes) -> None:
        if text := line.decode(errors="replace").rstrip():
            self.last_errors.append(text)
            self._hand_on({"is": "text", "text": text}, len(line))

    def _take_line(self, line: bytes) -> None:
        """Hand on a message, and separately any text before it: a login script may print without a line's end."""
        text, prefix, rest = line.partition(protocol.MESSAGE_PREFIX)
        try:
            message = protocol.decode(rest, "is") if prefix else None
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
        with self._lock:
            self._backlog_bytes += nbytes
        self._receive(message, functools.partial(self._acknowledge, nbytes))

    def _acknowledge(self, nbytes: int) -> None:
        # The launcher calls this on its own thread when it has handled the message.
        with self._lock:
            # Reading was stopped at the limit. It starts again only when the backlog falls below it.
            was_full, self._backlog_bytes = self.is_full, self._backlog_bytes - nbytes
            if was_full and not self.is_full:
                self._loop.call_soon_threadsafe(self._backlog_shrank.set)

    def _write(self, data: bytes) -> None:
        # Nothing may follow the end of the messages, and a process that has closed its stdin takes nothing any more.
        if not self._input.is_closing():
            self._input.write(data)

    def _abort_input(self) -> None:
        # asyncio cannot abort a pipe that is already closing.
        if self._input.get_write_buffer_size() or not self._input.is_closing():
            self._input.abort()


class ConnectionThread:
    """Read from and write to all connections on one thread, until it is closed. See the note above.

    Attributes:
        events: What has come over the connections: the owner, the message, and a function to call when the message has
            been handled.
    """

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[object, Message, Callable[[], None]]] = queue.SimpleQueue()
        self._open: set[ConnectionProcess] = set()
        self._started = threading.Event()
        # The thread is a daemon, so a launcher that fails elsewhere can still exit.
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="zero-launch connections", daemon=True
        )
        self._thread.start()
        self._started.wait()

    def connect(self, owner: object, command: Sequence[str]) -> ConnectionProcess:
        """Start a process and read from it.

        Args:
            owner: The owner that `events` names.
            command: The command.

        Raises:
            OSError: The process cannot be started.
        """
        connection = ConnectionProcess(
            command, self._loop, lambda message, acknowledge: self.events.put((owner, message, acknowledge))
        )
        asyncio.run_coroutine_threadsafe(connection.open(self._open), self._loop).result()
        return connection

    def close(self) -> None:
        """End the thread and close every pipe."""
        self._loop.call_soon_threadsafe(self._heartbeats.cancel)
        self._thread.join()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heartbeats = self._loop.create_task(self._send_heartbeats())
        self._started.set()
        # The end of the heartbeats ends the loop, which then cancels all other tasks.
        await asyncio.wait([self._heartbeats])

    async def _send_heartbeats(self) -> None:
        while True:
            for connection in self._open:
                connection.send_heartbeat()
            await asyncio.sleep(protocol.HEARTBEAT_INTERVAL_S)
