"""One line that says how a run goes: at the bottom of the terminal, or printed from time to time where there is none.

[Note: The bottom row]
The line has the terminal's bottom row for itself. The rows above are a scroll region (DECSTBM), in which the ranks'
output and progress bars go on as usual. Drawing saves and restores the cursor, so it may happen between any two writes.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from zeroengine.utils.formats import counted, format_count, format_duration, format_loss, format_memory, format_share
from zeroengine.view.run_reader import RunReader
from zeroengine.view.summary import memory_of, progress, speed

READ_INTERVAL_S = 0.5
# So many seconds lie between two lines where there is no terminal.
PLAIN_INTERVAL_S = 30.0
# A step that takes so many times as long as usual, and so many seconds, is pointed out.
LATE_FACTOR, LATE_SECONDS = 5.0, 5.0
# A terminal with fewer rows has no row to spare.
MIN_ROWS = 6
# The groups of steps that the reader keeps. The line needs the newest steps alone.
MAX_GROUPS = 64
# A rank is called slow if it costs at least this share of a step.
MIN_DELAY = 0.05
# So many parts of a step are shown.
MAX_SHARES = 3
SAVE_CURSOR, RESTORE_CURSOR = "\x1b7", "\x1b8"

# A part of the line: the text, its style, and its rank of importance (0 is never left out).
Part = tuple[str, str, int]


def live_parts(reader: RunReader, now: float | None = None, since: float = 0.0) -> list[Part]:
    """Return the parts of the line.

    Args:
        reader: The run.
        now: The time in Unix seconds (by default, that of this machine).
        since: Steps and events before this time belong to an earlier start of the run.
    """
    now = time.time() if now is None else now
    state = reader.state(now)
    recent, facts = speed(reader.recent), progress(reader, state)
    step, planned = facts["step"], facts["planned"]
    if reader.last is None or step is None or reader.last.end < since:
        before = "" if step is None else f" after step {step:,}"
        return [(f"no step yet{before}{_last_event(reader, now, since)}", "cyan", 0)]
    text = f"step {step:,}"
    if planned:
        text += f"/{planned:,} ({100 * step / planned:.0f} %)"
    parts: list[Part] = [(text, "bold", 0)]
    late = late_step(reader, recent["seconds_per_step"], state, now)
    if late:
        parts.append((late, "yellow", 1))
    loss = reader.last.mean("loss")
    if loss is not None:
        parts.append((f"loss {format_loss(loss)}", "green", 1))
    if recent["tokens_per_second"] is not None:
        parts.append((f"{format_count(recent['tokens_per_second'])} tokens/s", "cyan", 2))
    if recent["mfu"] is not None:
        parts.append((f"MFU {format_share(recent['mfu'])}", "", 6))
    parts.append((f"{format_duration(recent['seconds_per_step'])} a step", "", 5))
    split = split_in_words(recent["split"])
    if split:
        parts.append((split, "", 5))
    peak = reader.last.maxima.get("memory.peak") or sum(memory_of(reader.last, "device").values())
    if peak:
        parts.append((format_memory(peak), "magenta", 4))
    slow = slow_rank(reader)
    if slow:
        parts.append((slow, "yellow", 3))
    restarts = reader.num_events.get("restart", 0)
    if restarts:
        parts.append((counted(restarts, "restart"), "red", 3))
    if facts["remaining_seconds"]:
        parts.append((f"{format_duration(facts['remaining_seconds'])} to go", "", 2))
    return parts


def slow_rank(reader: RunReader) -> str:
    """Return which rank the others waited for most in the newest steps; empty if that cost next to nothing."""
    recent = reader.recent
    if recent is None or not recent.delays:
        return ""
    (rank, cause), delay = max(recent.delays.items(), key=lambda item: item[1].seconds)
    # A single late step is noise, which the mean over the newest steps makes small.
    seconds = delay.seconds / recent.num_steps
    if seconds < MIN_DELAY * (recent.mean("seconds") or 0.0):
        return ""
    return f"rank {rank} slow (+{format_duration(seconds)} {cause})"


def late_step(reader: RunReader, usual_seconds: float | None, state: str, now: float) -> str:
    """Return what to say of a step that takes far longer than usual; empty if none does."""
    if reader.last is None or usual_seconds is None or state in ("ended", "failed"):
        return ""
    waited = now - reader.last.end
    if waited < max(LATE_SECONDS, LATE_FACTOR * usual_seconds):
        return ""
    return f"the next step takes {format_duration(round(waited))} so far{_last_event(reader, reader.last.end)}"


def _last_event(reader: RunReader, now: float, since: float = 0.0) -> str:
    """Return the newest event with its age, after a colon; empty if there is none."""
    events = reader.events
    moment = events[-1].get("time") if events else None
    if moment is None or moment < since:
        return ""
    age = f" ({format_duration(round(now - moment))} ago)" if now >= moment + 1.0 else ""
    return f": {events[-1]['text']}{age}"


def split_in_words(split: dict[str, float]) -> str:
    """Return the shares of the largest parts of a step; empty if none are known."""
    total = sum(split.values())
    shares = sorted(((value / total, name) for name, value in split.items() if value), reverse=True)
    return " ".join(f"{name} {100 * share:.0f} %" for share, name in shares[:MAX_SHARES])


def plain_line(reader: RunReader, now: float | None = None) -> str:
    """Return the whole line as plain text."""
    return ", ".join(text for text, _, _ in live_parts(reader, now))


def fit(parts: Sequence[Part], width: int) -> Text:
    """Return the parts in one line of at most `width` columns; the least important ones are left out first."""
    kept = list(parts)

    def line() -> Text:
        return Text(" · ").join(Text(text, style) for text, style, _ in kept)

    while line().cell_len > width and len(kept) > 1:
        # Of equally important parts the later one goes.
        kept.remove(max(reversed(kept), key=lambda part: part[2]))
    fitted = line()
    fitted.truncate(width, overflow="ellipsis")
    return fitted


class LiveLine:
    """The line of one run, kept up to date by a thread of its own.

    Args:
        folder: The run folder; it may be written later.
        target: The file descriptor that the line is written to.
        is_live: Whether the line stays at the bottom of the terminal, if `target` is one. Otherwise there is a plain
            line every 30 seconds.

    Attributes:
        is_at_bottom: Whether the line stays at the bottom of the terminal.
    """

    def __init__(self, folder: Path, target: int, is_live: bool = True) -> None:
        self._folder, self._target = folder, target
        # A terminal without cursor control has no bottom row that could be addressed.
        self.is_at_bottom = is_live and os.isatty(target) and os.environ.get("TERM", "dumb") != "dumb"
        self._console = Console(force_terminal=True, width=1000, highlight=False)
        self._parts: list[Part] = []
        self._rows = 0  # of the terminal while the line is drawn, else 0
        self._drawn = ""
        self._printed_at, self._started = time.monotonic(), time.time()
        self._printed = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="live line", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        reader = RunReader(self._folder, MAX_GROUPS, wait=True)
        is_over = False
        # What is written until the end is read once more.
        while not is_over:
            is_over = self._is_over.wait(READ_INTERVAL_S)
            try:
                reader.read()
            except OSError:
                # The folder may be on a network that fails for a while. The line keeps what it says.
                continue
            if reader.events or reader.last:
                self._parts = live_parts(reader, since=self._started)

    def _shown_parts(self) -> list[Part]:
        if self._parts:
            return self._parts
        # Building a large model may take minutes, before its engine writes anything.
        waited = format_duration(int(time.time() - self._started))
        return [(f"waiting for the first record in {self._folder} ({waited})", "cyan", 0)]

    def update(self) -> str:
        """Return what is to be written to the target now; empty if nothing changed."""
        if self.is_at_bottom:
            return self._draw()
        now, line = time.monotonic(), ", ".join(text for text, _, _ in self._shown_parts())
        if now < self._printed_at + PLAIN_INTERVAL_S or line == self._printed:
            return ""
        self._printed_at, self._printed = now, line
        return f"zero-launch: {line}\n"

    def _draw(self) -> str:
        try:
            size = os.get_terminal_size(self._target)
        except OSError:
            # The terminal is gone. The ranks' output meets the same error, which ends the run.
            return ""
        if size.lines < MIN_ROWS:
            return self.end()
        with self._console.capture() as capture:
            self._console.print(fit(self._shown_parts(), size.columns - 1), end="", soft_wrap=True)
        line = f"\x1b[{size.lines};1H\x1b[2K{capture.get()}"
        begin = "" if size.lines == self._rows else self._reserve_row(size.lines)
        if not begin and line == self._drawn:
            return ""
        self._drawn = line
        return f"{begin}{SAVE_CURSOR}{line}{RESTORE_CURSOR}"

    def _reserve_row(self, rows: int) -> str:
        """Return the codes that keep the bottom row free of output."""
        self._rows = rows
        # Index (down, scrolling at the bottom) and up make room if the cursor is in the bottom row, and keep its
        # column. Setting the region moves the cursor, which is therefore saved before.
        return f"\x1bD\x1b[1A{SAVE_CURSOR}\x1b[1;{rows - 1}r{RESTORE_CURSOR}"

    def end(self) -> str:
        """Return the codes that give the bottom row back; empty if the line is not drawn."""
        rows, self._rows, self._drawn = self._rows, 0, ""
        return f"{SAVE_CURSOR}\x1b[r\x1b[{rows};1H\x1b[2K{RESTORE_CURSOR}" if rows else ""

    def close(self) -> str:
        """End the thread. Return what remains on the screen: how far the run came and what shows it."""
        self._is_over.set()
        self._thread.join(1.0)
        if not self._parts:
            return ""
        reached = ", ".join(text for text, _, _ in self._parts)
        command = f"zero-view {shlex.quote(str(self._folder))}"
        return f"zero-launch: {reached}\nzero-launch: to look at this run: {command}\n"
