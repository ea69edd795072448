"""The last words of a run that failed: who failed first, who else, and the first one's traceback at the very end."""

from __future__ import annotations

import signal

from zeroengine.launch.local.console import Console
from zeroengine.launch.local.rank import Failure, Outcome
from zeroengine.utils.launcher_environment import START_AGAIN

OTHERS = 4  # so many of the other failures are named


def report(outcome: Outcome, console: Console) -> str:
    """What to print on stderr when the run has ended, one string; empty after a success."""
    if outcome.interrupted is not None:
        return f"zero-launch: stopped by {outcome.interrupted.name}; every rank has ended\n"
    for failure in outcome.failures:
        console.log(failure.rank, failure.text)
    nodes = [f"zero-launch: {sentence}" for sentence in outcome.lost]
    if not outcome.failures:
        return "".join(f"{line}\n" for line in nodes)
    first, *others = outcome.failures
    if first.code == START_AGAIN and not first.text:
        return f"zero-launch: the ranks have ended to be started again (exit code {START_AGAIN})\n"
    lines = [f"zero-launch: {other.who} failed as well: {describe(other)}" for other in others[:OTHERS]]
    if len(others) > OTHERS:
        lines.append(f"zero-launch: and {len(others) - OTHERS} more ranks")
    lines.append(f"zero-launch: {first.who} failed{' first' if others else ''} ({ending(first.code)})")
    text = first.text.rstrip("\n") or console.tail(first.rank)
    lines += [console.prefix(first.rank) + line for line in text.split("\n") if text]
    return "\n".join([*lines, *nodes]) + "\n"


def describe(failure: Failure) -> str:
    """One failure in one line."""
    return failure.summary.partition("\n")[0] or ending(failure.code)


def ending(code: int) -> str:
    """An exit code in words."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"exit code {code}"
    if name == "SIGKILL":
        return f"exit code {code}: killed by SIGKILL, often because the machine ran out of memory (see dmesg)"
    return f"exit code {code}: killed by {name}"
