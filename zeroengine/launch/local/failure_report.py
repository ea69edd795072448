"""The text that is printed after a failed run: which rank failed first, which others, and the first one's traceback."""

from __future__ import annotations

import signal

from zeroengine.launch.local.console import Console
from zeroengine.launch.local.rank import RunOutcome
from zeroengine.utils.formats import counted
from zeroengine.utils.launcher import RESTART_EXIT_CODE

# So many failures are named besides the first one.
MAX_NAMED_FAILURES = 4
# The exit code of a process that signal n has killed is this plus n.
SIGNAL_CODES = 128


def failure_report(outcome: RunOutcome, console: Console) -> str:
    """Return the text to print on stderr when the run has ended; empty after a success.

    The failures' tracebacks are added to the ranks' log files.
    """
    if outcome.stop_signal is not None:
        if console.stop_reason:
            return (
                f"zero-launch: stopped, because {console.stop_reason}; every rank has ended. Send the output where it "
                "can be written, such as > /dev/null; --log-dir keeps it in files\n"
            )
        return f"zero-launch: stopped by {outcome.stop_signal.name}; every rank has ended\n"
    for failure in outcome.failures:
        console.log(failure.rank, failure.text.encode(errors="replace"))
    notices = [f"zero-launch: {sentence}" for sentence in (*outcome.node_losses, *outcome.notices)]
    if not outcome.failures:
        return "".join(f"{line}\n" for line in notices)
    first, *others = outcome.failures
    if first.code == RESTART_EXIT_CODE and not first.text:
        return f"zero-launch: the ranks have ended to be started again (exit code {RESTART_EXIT_CODE})\n"
    named = others[:MAX_NAMED_FAILURES]
    reasons = [other.summary.partition("\n")[0] or describe_exit_code(other.code) for other in named]
    lines = [f"zero-launch: {o.label} failed as well: {reason}" for o, reason in zip(named, reasons, strict=True)]
    if len(others) > len(named):
        lines.append(f"zero-launch: and {counted(len(others) - len(named), 'more rank')}")
    failed = f"zero-launch: {first.label} failed{' first' if others else ''} ({describe_exit_code(first.code)})"
    text = first.text.rstrip("\n") or console.tail(first.rank)
    output = [console.prefix(first.rank) + line for line in text.split("\n") if text]
    # The cause comes last: the traceback or the last output, or the signal that killed a rank whatever it had printed.
    is_killed = not first.text and first.code > SIGNAL_CODES
    lines += [*output, failed] if is_killed else [failed, *output]
    # What the run does now comes behind the cause of this round.
    return "\n".join([*lines, *notices]) + "\n"


def describe_exit_code(code: int) -> str:
    """Return an exit code in words."""
    try:
        name = signal.Signals(code - SIGNAL_CODES).name
    except ValueError:
        return f"exit code {code}"
    if name == "SIGKILL":
        return f"exit code {code}: killed by SIGKILL, often because the machine ran out of memory (see dmesg)"
    return f"exit code {code}: killed by {name}"
