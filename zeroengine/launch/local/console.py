"""Print the ranks' output: whole lines, each after its rank's name.

[Note: Pipes and terminals]
Every rank has two outputs, its stdout and its stderr. If the launcher's own output is a terminal and the ranks run on
the same machine, rank 0 has a terminal too: a pty that is narrower by the prefix. Its progress bars are then drawn as
usual, and a line from another rank is inserted above the bar. All other outputs are pipes. Of a line that a pipe
redraws by carriage returns, only the last version is printed.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zeroengine.errors import LaunchError

if TYPE_CHECKING:  # it needs rich, and only a run with a run folder has such a line
    from zeroengine.view.live_line import LiveLine

STDOUT, STDERR = 1, 2
COLORS = (36, 35, 33, 32, 34, 31)
ERASE_LINE = b"\r\x1b[K"
# This restores plain colors and a visible cursor after an interrupted progress bar.
RESTORE_TERMINAL = b"\x1b[0m\x1b[?25h"
# The seconds after which a pipe's unfinished line is printed.
UNFINISHED_LINE_TIMEOUT_S = 10.0
# The most bytes of a terminal's unfinished line that are drawn again after another rank's line.
MAX_REDRAWN_BYTES = 65536
# So many bytes of each rank's stderr are kept for the failure report.
TAIL_BYTES = 8192
CONTROL = rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[^\[\n\r\x1b])"
TOKEN = re.compile(rb"\n|\r|" + CONTROL + rb"|[^\n\r\x1b]+|\x1b")
INCOMPLETE_CONTROL = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*)?\Z")


@dataclass
class RankOutput:
    """One output of one rank: bytes come in as they are read, and go out as they are to be printed."""

    rank: int
    target: int  # where the launcher prints it: STDOUT or STDERR
    is_terminal: bool
    prefix: bytes
    # The text after the last line's end, in its last version; of a terminal, with the prefix. A bytearray, so that a
    # line that arrives in many parts is put together in linear time.
    unfinished: bytearray = field(default_factory=bytearray)
    unfinished_since: float = field(default_factory=time.monotonic)
    # Of a terminal: the line's end or carriage return that came last, or b"" within a line.
    last_break: bytes = b"\n"
    # Of a terminal: the beginning of a control sequence whose end has not arrived.
    incomplete_control: bytes = b""
    tail: bytes = b""

    def complete_lines(self, data: bytes) -> bytes:
        """Return the lines that a pipe's new data complete, each with its prefix and in its last version."""
        had_unfinished = bool(self.unfinished)
        *ended, rest = data.split(b"\n")
        out = b""
        if ended:
            self._extend_unfinished(ended[0])
            lines = [bytes(self.unfinished), *ended[1:]]
            self.unfinished = bytearray()
            # Whole lines are joined into one write, so lines of different ranks cannot mix.
            out = b"".join(self.prefix + last_version(line) + b"\n" for line in lines)
        self._extend_unfinished(rest)
        # The time starts with the first byte of a line, so a line that arrives in many parts still appears in time.
        if ended or not had_unfinished:
            self.unfinished_since = time.monotonic()
        return out

    def _extend_unfinished(self, data: bytes) -> None:
        """Add to a pipe's unfinished line and keep its last version."""
        # Carriage returns at the end may belong to the line's end, so they do not erase the line yet.
        body = data.rstrip(b"\r")
        if body:
            if b"\r" in body or self.unfinished.endswith(b"\r"):
                self.unfinished.clear()
            self.unfinished += last_version(body)
        self.unfinished += data[len(body) :]

    def end_line(self) -> bytes:
        """Return a pipe's unfinished line as a whole line, and begin a new one."""
        line, self.unfinished = last_version(bytes(self.unfinished)), bytearray()
        return self.prefix + line + b"\n" if line else b""

    def with_prefixes(self, data: bytes) -> bytes:
        """Return a terminal's new data with the prefix before the first text of every line.

        Cursor movements and erasures are put before the prefix, because they may erase the prefix itself.
        """
        # A read may end in the middle of a control sequence, which would be torn apart by the prefix.
        data = self.incomplete_control + data
        incomplete = INCOMPLETE_CONTROL.search(data)
        self.incomplete_control = incomplete[0] if incomplete else b""
        out = b""
        for token in TOKEN.findall(data[: len(data) - len(self.incomplete_control)]):
            if token == b"\n":
                # An empty line gets a prefix as well, and a line that was redrawn has one already.
                out += self.prefix + token if self.last_break == b"\n" else token
                self.unfinished, self.last_break = bytearray(), token
            elif token == b"\r":
                out, self.last_break = out + token, token
            elif self.last_break and token[:1] == b"\x1b" and token[-1:] != b"m":
                out += token
            else:
                if self.last_break:
                    self.unfinished, self.last_break, token = bytearray(), b"", self.prefix + token
                out += token
                self.unfinished += token
                del self.unfinished[:-MAX_REDRAWN_BYTES]
        return out


class Console:
    """Print the output of all ranks of a run, one writer at a time.

    Args:
        log_dir: A folder that receives each rank's output unchanged, as `rank0.log` and so on. It is created.
        live_line: How the run goes, in one line below the ranks' output; None for no such line.

    Attributes:
        stop_reason: Why the console has ended the run; empty if it has not.

    Raises:
        LaunchError: The folder cannot be created.
    """

    def __init__(self, log_dir: Path | None = None, live_line: LiveLine | None = None) -> None:
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(f"--log-dir {log_dir}: cannot be made a folder for logs ({error.strerror})") from None
        self._log_dir, self._live_line = log_dir, live_line
        self._outputs: dict[tuple[int, int], RankOutput] = {}
        # The unfinished line of this output is the last one on the terminal.
        self._drawn: RankOutput | None = None
        self._run_is_over = False
        # Why nothing is written any more to STDOUT or STDERR.
        self._write_errors: dict[int, OSError] = {}
        self.stop_reason = ""

    def assign(self, names: Sequence[str], terminal: bool = False) -> None:
        """Set the ranks' names for the next round.

        Args:
            names: The names in rank order, without brackets.
            terminal: Whether rank 0 has a terminal for each of its outputs for which the launcher has one.
        """
        # The names change with the round, so lines of the last round are printed under their old names.
        self.flush(everything=True)
        self._run_is_over, self._drawn = False, None
        width = max(map(len, names))
        self._outputs = {
            (rank, target): open_output(rank, f"[{name:>{width}}]", target, terminal and rank == 0)
            for rank, name in enumerate(names)
            for target in (STDOUT, STDERR)
        }

    def terminals(self) -> dict[int, int]:
        """Return the targets for which rank 0 has a terminal, each with the width of the prefix in columns."""
        outputs = self._outputs.values()
        return {output.target: len(re.sub(CONTROL, b"", output.prefix)) for output in outputs if output.is_terminal}

    def feed(self, rank: int, target: int, data: bytes) -> None:
        """Print new output of a rank."""
        output = self._outputs[rank, target]
        # The log receives the bytes as the rank wrote them, before any prefix or erasure.
        self.log(rank, data)
        if target == STDERR:
            output.tail = (output.tail + data)[-TAIL_BYTES:]
        self._print(output, output.with_prefixes(data) if output.is_terminal else output.complete_lines(data))

    def flush(self, everything: bool = False) -> None:
        """Print unfinished lines that have waited for long; with `everything`, all of them."""
        for output in self._outputs.values():
            if output.is_terminal:
                if everything:
                    # A bar that was left unfinished ends with a line of its own, or the shell's prompt would stand
                    # behind it.
                    self._write(output.target, b"\n" * bool(output.unfinished) + RESTORE_TERMINAL)
                    output.unfinished = bytearray()
            elif output.unfinished:
                waited = time.monotonic() - output.unfinished_since
                if everything or waited > UNFINISHED_LINE_TIMEOUT_S:
                    self._print(output, output.end_line())
        if self._live_line is not None:
            self._write_live_line(self._live_line, is_over=everything)

    def _write_live_line(self, live_line: LiveLine, is_over: bool) -> None:
        """Bring the line up to date, or give its row back when a round is over."""
        if is_over:
            # What comes next may be the shell's prompt, or the end of this process.
            self._write(STDERR, live_line.end().encode())
        elif live_line.is_at_bottom:
            self._write(STDERR, live_line.update().encode(errors="replace"))
        elif text := live_line.update():
            self.print_own(text)

    def finish(self) -> None:
        """Mark the run as over: from now on a closed terminal no longer stops it."""
        self._run_is_over = True

    def close(self) -> None:
        """Print how far the run has come and where it is recorded, unless there is no live line."""
        if self._live_line is not None:
            self.print_own(self._live_line.close())

    def print_own(self, text: str) -> None:
        """Print the launcher's own lines on stderr, above the line that is being drawn there."""
        data = text.encode(errors="replace")
        # The line of a progress bar is erased, and drawn again below the launcher's own text.
        if self._drawn is not None and self._drawn.unfinished and os.isatty(STDERR):
            data = ERASE_LINE + data + self._drawn.unfinished + self._drawn.last_break
        self._write(STDERR, data)

    def tail(self, rank: int, lines: int = 10) -> str:
        """Return the last lines that the rank wrote to its stderr."""
        text = re.sub(CONTROL, b"", self._outputs[rank, STDERR].tail).decode(errors="replace")
        # Only the last version of a redrawn line is shown, as a terminal would have shown it.
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.strip("\n").split("\n")[-lines:])

    def prefix(self, rank: int) -> str:
        """Return the prefix of the rank's lines."""
        return self._outputs[rank, STDERR].prefix.decode()

    def log(self, rank: int, data: bytes) -> None:
        """Add to the rank's log file."""
        if self._log_dir is None or not data:
            return
        try:
            # Opening the file for each write keeps no descriptor for each of thousands of ranks.
            with open(self._log_dir / f"rank{rank}.log", "ab", buffering=0) as log:
                log.write(data)
        except OSError as error:
            # A full disk must not stop the run.
            # The first error ends all logging, so that the message is not repeated for every line.
            self._log_dir = None
            self._write(STDERR, f"zero-launch: no more log files: {error}\n".encode())

    def _print(self, output: RankOutput, data: bytes) -> None:
        """Write to the launcher's own output, without breaking another rank's unfinished line on the terminal."""
        drawn = self._drawn
        if drawn is not None and drawn is not output and drawn.unfinished and os.isatty(output.target):
            if output.is_terminal and output.unfinished:
                # Two progress bars cannot share a line, so the second one begins a new line.
                data = b"\n" + data
            elif data:
                # The line is erased, and drawn again below the new one.
                data = ERASE_LINE + data + drawn.unfinished + drawn.last_break
        if output.is_terminal and output.unfinished:
            self._drawn = output
        self._write(output.target, data)

    def _write(self, target: int, data: bytes) -> None:
        """Write all of it. If that is impossible (a closed pipe or terminal, a full disk), end the run."""
        rest = memoryview(data)
        while rest and target not in self._write_errors:
            try:
                rest = rest[os.write(target, rest) :]
            except BlockingIOError:
                # Whoever started zero-launch has made the pipe non-blocking, and it is full.
                time.sleep(0.01)
            except OSError as error:
                # The reader of a closed output does not come back, so nothing is written there any more.
                self._write_errors[target] = error
                if not self._run_is_over and not self.stop_reason:
                    name = "stderr" if target == STDERR else "stdout"
                    self.stop_reason = f"{name} cannot be written ({error.strerror})"
                    # The signal ends the run in the same order as Ctrl-C would. When the run is over, only its last
                    # message is lost.
                    os.kill(os.getpid(), signal.SIGTERM)


def open_output(rank: int, name: str, target: int, terminal: bool) -> RankOutput:
    """Return one output of a rank, with its prefix colored on a terminal."""
    if os.isatty(target) and not os.environ.get("NO_COLOR"):
        name = f"\x1b[{COLORS[rank % len(COLORS)]}m{name}\x1b[0m"
    return RankOutput(rank, target, terminal and os.isatty(target), f"{name} ".encode())


def last_version(line: bytes) -> bytes:
    """Return the visible part of a line after its carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
