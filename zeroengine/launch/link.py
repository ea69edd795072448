"""The launcher's connection to one node: a process such as ssh, and what has come over it so far."""

from __future__ import annotations

import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from pathlib import Path

from zeroengine.launch import bootstrap
from zeroengine.launch.hosts import Host
from zeroengine.launch.shells import Shell
from zeroengine.launch.wire import MARK, Message, Writer, decode

RETRY = 3.0  # seconds between two attempts to reach a node that was lost
QUOTED = 5  # lines of what ssh said that are kept
LAST_WORDS_S = 1.0  # for what it said at its end to arrive; a process that it leaves behind may keep the pipe open

# A link and what came over it. Bounded: where the screen is slow, the ranks wait as they do for any slow terminal.
Events = queue.Queue


class Link:
    """One node as the launcher sees it. Only the launcher's main thread uses it; readers of its own put into `events`.

    Attributes:
        heard: `time.monotonic` of the last sign of life.
        clock: seconds that its `time.monotonic` is behind this one's, by the quickest message: one that is on its way
            for long makes it seem to be further behind.
        lost: why the node is not there any more, in words; None while it is.
        retry_at: `time.monotonic` before which a lost node is not connected to again.
        running: whether its ranks run now.
    """

    def __init__(self, host: Host, shell: Shell, wanted: Message, events: Events[tuple[Link, Message]]) -> None:
        self.host = host
        self.began = self.heard = time.monotonic()
        self.clock = math.inf
        self.hello: Message | None = None
        self.facts: Message | None = None
        self.answer: Message | None = None
        self.lost: str | None = None
        self.retry_at = 0.0
        self.running = False
        self.begin(0, 0)
        self._shell = shell
        self._said: deque[str] = deque(maxlen=QUOTED)
        self._process = subprocess.Popen(
            shell.starter(host.name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        assert self._process.stdin is not None
        self._writer = Writer(os.dup(self._process.stdin.fileno()))
        self._process.stdin.close()
        self._readers = [
            threading.Thread(target=read, args=(events,), name=f"zero-launch {host.name}", daemon=True)
            for read in (self._read_errors, self._read_messages)
        ]
        for reader in self._readers:
            reader.start()
        source = Path(bootstrap.__file__).read_text()
        self._writer.write(f"exec({source!r})\n".encode())
        self._writer.send(wanted)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.nproc)

    def begin(self, first_rank: int, nproc: int) -> None:
        """Before a round, in which the node has these ranks."""
        self.first_rank, self.nproc = first_rank, nproc
        self.ended: Message | None = None  # how its ranks ended
        self.stepped = False  # one of them has taken a step
        self.finished = False  # all of them well, and the others are waited for
        self.stopped = False  # told to end them

    def send(self, message: Message) -> None:
        if self.lost is None:
            self._writer.send(message)

    def lose(self, why: str) -> None:
        """From now on the node is not there; its end of the connection, if any, will end its ranks."""
        if self.lost is None:
            self.lost = why
            self.retry_after(RETRY)
            self.close()

    def retry_after(self, seconds: float) -> None:
        self.retry_at = time.monotonic() + seconds

    def close(self) -> None:
        """End the connection. The node's side ends what runs there."""
        self._writer.close()

    def kill(self, patience: float = 0.0) -> None:
        """After `patience` seconds for it to end by itself, end the connecting process."""
        self.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def is_connected(self) -> bool:
        return self._process.poll() is None

    def why_gone(self, code: int) -> str:
        """A sentence about a connection that has ended by itself."""
        said = " / ".join(self._said)
        if self.hello is None:
            if code == 127 and self._shell.name == "ssh":
                return f"there is no such Python: {said}"
            return said or f"{self._shell.name} ended with {_ending(code)}"
        return f"its connection ended ({_ending(code)})" + (f": {said}" if said else "")

    def _read_messages(self, events: Events[tuple[Link, Message]]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.heard = time.monotonic()
            if line.startswith(MARK):
                message = decode(line[len(MARK) :])
                if "clock" in message:
                    self.clock = min(self.clock, self.heard - message["clock"])
                if message["is"] != "beat":
                    message["at"] = self.heard
                    events.put((self, message))
            elif line.strip():
                events.put((self, {"is": "text", "text": line.decode(errors="replace").rstrip()}))
        code = self._process.wait()
        self._readers[0].join(LAST_WORDS_S)
        events.put((self, {"is": "gone", "code": code}))

    def _read_errors(self, events: Events[tuple[Link, Message]]) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode(errors="replace").rstrip()
            if text:
                self._said.append(text)
                events.put((self, {"is": "text", "text": text}))


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
