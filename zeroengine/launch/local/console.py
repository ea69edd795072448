"""Prints what the ranks print: whole lines, each with its rank before it.

Every rank writes into two channels, its stdout and its stderr. Where the launcher's own output is a terminal and the
ranks run beside it, rank 0 gets a terminal too (a pty, narrower by the prefix), so its progress bars are drawn as
anywhere else; a line from another rank is slipped in above the bar. All other channels are pipes, in which of a line
redrawn by carriage returns only the last version is printed.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

STDOUT, STDERR = 1, 2
COLOURS = (36, 35, 33, 32, 34, 31)
ERASE = b"\r\x1b[K"
RESTORE = b"\x1b[0m\x1b[?25h"  # plain colours and a visible cursor, after a progress bar that was cut short
HOLD = 10.0  # seconds that a pipe's unfinished line is held back
REDRAWN = 65536  # bytes of a terminal's unfinished line that are drawn again after another line
TAIL = 8192  # bytes of each rank's stderr kept for the report
CONTROL = rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[^\[\n\r\x1b])"
TOKEN = re.compile(rb"\n|\r|" + CONTROL + rb"|[^\n\r\x1b]+|\x1b")
CUT_CONTROL = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*)?\Z")


@dataclass
class Channel:
    """One output of one rank."""

    rank: int
    target: int  # where the launcher prints it: STDOUT or STDERR
    is_terminal: bool
    prefix: bytes
    # What came after the last line's end, in its last version; of a terminal, with its prefix. An array, so that a line
    # that comes in many pieces is put together in linear time.
    unfinished: bytearray = field(default_factory=bytearray)
    since: float = field(default_factory=time.monotonic)  # when that began
    last: bytes = b"\n"  # of a terminal: a line's end, a carriage return, or b"" within a line
    cut: bytes = b""  # of a terminal: the beginning of a control sequence
    tail: bytes = b""

    def lines(self, data: bytes) -> bytes:
        """What a pipe's new data complete: lines, prefixed, each in its last version."""
        began = bool(self.unfinished)
        *whole, rest = data.split(b"\n")
        out = b""
        if whole:
            self._add(whole[0])
            lines = [bytes(self.unfinished), *whole[1:]]
            self.unfinished = bytearray()
            out = b"".join(self.prefix + last_version(line) + b"\n" for line in lines)
        self._add(rest)
        if whole or not began:
            self.since = time.monotonic()
        return out

    def _add(self, data: bytes) -> None:
        """To a pipe's unfinished line, in its last version. Carriage returns at the end may end the line."""
        body = data.rstrip(b"\r")
        if body:
            if b"\r" in body or self.unfinished.endswith(b"\r"):
                self.unfinished.clear()
            self.unfinished += last_version(body)
        self.unfinished += data[len(body) :]

    def flush(self) -> bytes:
        """A pipe's unfinished line, as a line."""
        line, self.unfinished = last_version(bytes(self.unfinished)), bytearray()
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
                self.unfinished, self.last = bytearray(), token
            elif token == b"\r":
                out, self.last = out + token, token
            elif self.last and token[:1] == b"\x1b" and token[-1:] != b"m":
                out += token
            else:
                if self.last:
                    self.unfinished, self.last, token = bytearray(), b"", self.prefix + token
                out += token
                self.unfinished += token
                del self.unfinished[:-REDRAWN]
        return out


class Console:
    """The channels of a run's ranks, and what stands on the screen."""

    def __init__(self, log_dir: Path | None = None) -> None:
        self._log_dir = log_dir
        self._channels: dict[tuple[int, int], Channel] = {}
        self._drawing: Channel | None = None  # whose unfinished line stands on the terminal
        self._closing = self._lost = False

    def assign(self, names: Sequence[str], terminal: bool = False) -> None:
        """From now on these are the ranks' names, in rank order; with `terminal`, rank 0 has one where we have."""
        self.flush(everything=True)
        self._closing, self._drawing = False, None
        width = max(map(len, names))
        self._channels = {
            (rank, target): open_channel(rank, f"[{name:>{width}}]", target, terminal and rank == 0)
            for rank, name in enumerate(names)
            for target in (STDOUT, STDERR)
        }

    def terminals(self) -> dict[int, int]:
        """The targets for which rank 0 has a terminal, each with the columns that its prefix takes."""
        channels = self._channels.values()
        return {channel.target: len(visible(channel.prefix)) for channel in channels if channel.is_terminal}

    def feed(self, rank: int, target: int, data: bytes) -> None:
        """Print what the rank wrote."""
        channel = self._channels[rank, target]
        self._log(rank, data)
        if target == STDERR:
            channel.tail = (channel.tail + data)[-TAIL:]
        self._print(channel, channel.drawn(data) if channel.is_terminal else channel.lines(data))

    def flush(self, everything: bool = False) -> None:
        """Print unfinished lines: those that have waited for long, at the end all of them."""
        for channel in self._channels.values():
            if channel.is_terminal:
                if everything:
                    self._write(channel.target, b"\n" * bool(channel.unfinished) + RESTORE)
                    channel.unfinished = bytearray()
            elif channel.unfinished and (everything or time.monotonic() - channel.since > HOLD):
                self._print(channel, channel.flush())

    def finish(self) -> None:
        """The run is over: from now on a screen that is gone has nothing to end."""
        self._closing = True

    def say(self, text: str) -> None:
        """Print lines of our own on stderr, above what is being drawn there."""
        data = text.encode(errors="replace")
        if self._drawing is not None and self._drawing.unfinished and os.isatty(STDERR):
            data = ERASE + data + self._drawing.unfinished + self._drawing.last
        self._write(STDERR, data)

    def tail(self, rank: int, lines: int = 10) -> str:
        """The last lines that the rank wrote to its stderr."""
        text = re.sub(CONTROL, b"", self._channels[rank, STDERR].tail).decode(errors="replace")
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.strip("\n").split("\n")[-lines:])

    def log(self, rank: int, text: str) -> None:
        """Add to the rank's log file what the rank itself did not print."""
        self._log(rank, text.encode(errors="replace"))

    def prefix(self, rank: int) -> str:
        return self._channels[rank, STDERR].prefix.decode()

    def _log(self, rank: int, data: bytes) -> None:
        if self._log_dir is None or not data:
            return
        try:
            with open(self._log_dir / f"rank{rank}.log", "ab", buffering=0) as log:
                log.write(data)
        except OSError as error:  # a full disk must not stop the run
            self._log_dir = None
            self._write(STDERR, f"zero-launch: no more log files: {error}\n".encode())

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
        rest = memoryview(data)
        while rest and not self._lost:
            try:
                rest = rest[os.write(target, rest) :]
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                self._lost = True
                if not self._closing:
                    os.kill(os.getpid(), signal.SIGTERM)


def open_channel(rank: int, name: str, target: int, terminal: bool) -> Channel:
    if os.isatty(target) and not os.environ.get("NO_COLOR"):
        name = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{name}\x1b[0m"
    return Channel(rank, target, terminal and os.isatty(target), f"{name} ".encode())


def last_version(line: bytes) -> bytes:
    """What is left to see of a line after its carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def visible(text: bytes) -> bytes:
    return re.sub(CONTROL, b"", text)
