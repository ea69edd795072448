"""Prints what the ranks print: whole lines, each with its rank before it.

Every rank writes into two channels, its stdout and its stderr, and one thread reads them all. Where the launcher's
own output is a terminal, rank 0 gets a terminal too (a pty, narrower by the prefix), so its progress bars are drawn as
anywhere else; a line from another rank is slipped in above the bar. All other channels are pipes, in which of a line
redrawn by carriage returns only the last version is printed.
"""

from __future__ import annotations

import fcntl
import os
import re
import selectors
import signal
import struct
import termios
import threading
import time
import tty
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

STDOUT, STDERR = 1, 2
COLOURS = (36, 35, 33, 32, 34, 31)
ERASE = b"\r\x1b[K"
RESTORE = b"\x1b[0m\x1b[?25h"  # plain colours and a visible cursor, after a progress bar that was cut short
HOLD = 10.0  # seconds that a pipe's unfinished line is held back
TAIL = 8192  # bytes of each rank's stderr kept for the report
CONTROL = rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[^\[\n\r\x1b])"
TOKEN = re.compile(rb"\n|\r|" + CONTROL + rb"|[^\n\r\x1b]+|\x1b")
CUT_CONTROL = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*)?\Z")


@dataclass
class Channel:
    """One output of one rank."""

    rank: int
    target: int  # where the launcher prints it: STDOUT or STDERR
    reader: int  # file descriptors
    writer: int
    is_terminal: bool
    prefix: bytes
    unfinished: bytes = b""  # what came after the last line's end; of a terminal, with its prefix
    since: float = field(default_factory=time.monotonic)  # when that began
    last: bytes = b"\n"  # of a terminal: a line's end, a carriage return, or b"" within a line
    cut: bytes = b""  # of a terminal: the beginning of an control sequence
    tail: bytes = b""

    def lines(self, data: bytes) -> bytes:
        """What a pipe's new data complete: lines, prefixed, each in its last version."""
        began = bool(self.unfinished)
        *whole, rest = (self.unfinished + data).split(b"\n")
        body = rest.rstrip(b"\r")
        self.unfinished = last_version(body) + rest[len(body) :]
        if whole or not began:
            self.since = time.monotonic()
        return b"".join(self.prefix + last_version(line) + b"\n" for line in whole)

    def flush(self) -> bytes:
        """A pipe's unfinished line, as a line."""
        line, self.unfinished = last_version(self.unfinished), b""
        return self.prefix + line + b"\n" if line else b""

    def drawn(self, data: bytes) -> bytes:
        """A terminal's new data with the prefix before the first text of every line.

        Cursor movements and erasures pass before the prefix, since what they erase may be the prefix itself.
        """
        data = self.cut + data
        cut = CUT_CONTROL.search(data)
        self.cut = cut[0] if cut else b""
        out = b""
        for token in TOKEN.findall(data[: len(data) - len(self.cut)]):
            if token == b"\n":
                out += self.prefix + token if self.last == b"\n" else token
                self.unfinished, self.last = b"", token
            elif token == b"\r":
                out, self.last = out + token, token
            elif self.last and token[:1] == b"\x1b" and token[-1:] != b"m":
                out += token
            else:
                if self.last:
                    self.unfinished, self.last, token = b"", b"", self.prefix + token
                out, self.unfinished = out + token, self.unfinished + token
        return out


class Console:
    """The channels of a run's ranks and the thread that prints them, for a `with` block."""

    def __init__(self, ranks: int, log_dir: Path | None = None) -> None:
        self._channels = {
            (rank, target): open_channel(rank, ranks, target) for rank in range(ranks) for target in (STDOUT, STDERR)
        }
        self._logs = [log_dir / f"rank{rank}.log" for rank in range(ranks)] if log_dir else []
        self._has_terminal = any(channel.is_terminal for channel in self._channels.values())
        self._drawing: Channel | None = None  # whose unfinished line stands on the terminal
        self._closing = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._run, name="zero-launch console", daemon=True)

    def path(self, rank: int, target: int) -> str:
        """The file that the rank's output is to be written to."""
        return f"/dev/fd/{self._channels[rank, target].writer}"

    def environment(self, rank: int) -> dict[str, str]:
        """What the rank must be told: a terminal's width, for programs that measure stdin's instead."""
        channel = self._channels[rank, STDOUT]
        return {"COLUMNS": str(os.get_terminal_size(channel.reader).columns)} if channel.is_terminal else {}

    def tail(self, rank: int, lines: int = 10) -> str:
        """The last lines that the rank wrote to its stderr."""
        text = re.sub(CONTROL, b"", self._channels[rank, STDERR].tail).decode(errors="replace")
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.strip("\n").split("\n")[-lines:])

    def log(self, rank: int, text: str) -> None:
        """Add to the rank's log file what the rank itself did not print."""
        self._log(rank, text.encode(errors="replace"))

    def prefix(self, rank: int) -> str:
        return self._channels[rank, STDERR].prefix.decode()

    def __enter__(self) -> Console:
        self._resize()
        if self._has_terminal:
            signal.signal(signal.SIGWINCH, self._resize)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Print what is left, once every process of the run is gone."""
        if self._has_terminal:
            signal.signal(signal.SIGWINCH, signal.SIG_DFL)
        self._closing.set()
        self._thread.join()
        for channel in self._channels.values():
            os.close(channel.reader)
            os.close(channel.writer)

    def _resize(self, _: int = 0, __: FrameType | None = None) -> None:
        for channel in self._channels.values():
            if channel.is_terminal:
                size = os.get_terminal_size(channel.target)
                columns = max(1, size.columns - len(visible(channel.prefix)))
                fcntl.ioctl(channel.writer, termios.TIOCSWINSZ, struct.pack("4H", size.lines, columns, 0, 0))

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for channel in self._channels.values():
                selector.register(channel.reader, selectors.EVENT_READ, channel)
            while True:
                closing = self._closing.is_set()
                ready = selector.select(0.05 if closing else 0.2)
                for key, _ in ready:
                    self._read(key.data)
                self._flush(everything=closing and not ready)
                if closing and not ready:
                    return

    def _read(self, channel: Channel) -> None:
        data = os.read(channel.reader, 1 << 16)
        self._log(channel.rank, data)
        if channel.target == STDERR:
            channel.tail = (channel.tail + data)[-TAIL:]
        self._print(channel, channel.drawn(data) if channel.is_terminal else channel.lines(data))

    def _log(self, rank: int, data: bytes) -> None:
        if not self._logs or not data:
            return
        try:
            with open(self._logs[rank], "ab", buffering=0) as log:
                log.write(data)
        except OSError as error:  # a full disk must not stop the run
            self._logs = []
            self._write(STDERR, f"zero-launch: no more log files: {error}\n".encode())

    def _flush(self, everything: bool) -> None:
        """Print unfinished lines: those that have waited for long, at the end all of them."""
        for channel in self._channels.values():
            if channel.is_terminal:
                if everything:
                    self._write(channel.target, b"\n" * bool(channel.unfinished) + RESTORE)
                    channel.unfinished = b""
            elif channel.unfinished and (everything or time.monotonic() - channel.since > HOLD):
                self._print(channel, channel.flush())

    def _print(self, channel: Channel, data: bytes) -> None:
        """Write to the launcher's own output; around another channel's unfinished line, where one stands there."""
        standing = self._drawing
        if standing is not None and standing is not channel and standing.unfinished and os.isatty(channel.target):
            if channel.is_terminal and channel.unfinished:
                data = b"\n" + data
            elif data:
                data = ERASE + data + standing.unfinished + standing.last
        if channel.is_terminal and channel.unfinished:
            self._drawing = channel
        self._write(channel.target, data)

    def _write(self, target: int, data: bytes) -> None:
        """Write all of it. Where nobody reads any more (a closed pipe or terminal), end the run."""
        while data and not self._lost:
            try:
                data = data[os.write(target, data) :]
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                self._lost = True
                if not self._closing.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)


def open_channel(rank: int, ranks: int, target: int) -> Channel:
    is_terminal = rank == 0 and os.isatty(target)
    reader, writer = os.openpty() if is_terminal else os.pipe()
    if is_terminal:
        tty.setraw(writer)
    os.set_blocking(reader, False)
    prefix = f"[rank {rank:>{len(str(ranks - 1))}}]"
    if os.isatty(target) and not os.environ.get("NO_COLOR"):
        prefix = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{prefix}\x1b[0m"
    return Channel(rank, target, reader, writer, is_terminal, f"{prefix} ".encode())


def last_version(line: bytes) -> bytes:
    """What is left to see of a line after its carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def visible(text: bytes) -> bytes:
    return re.sub(CONTROL, b"", text)
