"""Recognise a run whose ranks fail in the same way again and again, so that it ends in place of being started again.

[Note: Equal failures]
A script that fails because of its data or its code fails in the same way from the same checkpoint. A machine that fails
does so for its own reasons, and another start is right. So two rounds have failed equally where all of this holds:

- *The error*: their first failures have the same exit code, type and text. Words with a digit in them and temporary
  paths do not count: they are ranks, losses, times, ports, addresses or numbers of processes.
- *The step*: the ranks that failed first had taken the same number of steps. A round that got further is not equal.
- *A script, not a machine*: no node was lost, and every rank that failed by itself has left an error. A signal leaves
  none: SIGKILL, and also SIGSEGV and SIGABRT, which come from scripts, but from bad memory and from NCCL's watchdog
  after a fault of the network as well, and nothing tells these apart. Nor does `os._exit`.
- *The time*: a script that takes its steps without zeroengine reports none. There only errors of the first
  STEADY_ROUND_S seconds count (worker.py), since a longer round may have made progress.
"""

from __future__ import annotations

import re
from dataclasses import replace

from zeroengine.launch.local.rank import MAX_EQUAL_FAILURES, RankFailure, RunOutcome

# A search goes on only from the start of a word, so that the time is proportional to the length of the text.
CHANGING_WORD = re.compile(r"(?<!\S)\S*/(?:tmp|dev/shm)[^\s'\"]*|(?<!\w)[-+]?\w*?\d[\w.:+-]*")


def count_equal_failures(previous: RunOutcome, outcome: RunOutcome) -> RunOutcome:
    """Return the outcome of a round with the number of rounds in a row that have failed equally. See "Equal failures".

    Args:
        previous: The outcome of the round before, counted. Without failures where there was none.
        outcome: How the round ended.
    """
    first = next(iter(outcome.failures), None)
    if first is None or first.step is None or outcome.node_losses or not all(f.summary for f in outcome.failures):
        return outcome
    is_equal = previous.num_equal > 0 and _identity(first) == _identity(previous.failures[0])
    count = previous.num_equal + 1 if is_equal else 1
    return replace(outcome, num_equal=count, notices=(_describe(first, count),) if is_equal else ())


def _identity(failure: RankFailure) -> tuple[object, ...]:
    return failure.code, failure.step, CHANGING_WORD.sub("#", failure.summary)


def _describe(failure: RankFailure, count: int) -> str:
    step, reason = failure.step, failure.summary.partition("\n")[0].rstrip(".")
    place = f"after step {step}, this time from step {failure.resumed_step}" if step else "before the first step"
    advice = f"look at step {step} (zero-replay RUN --step {step}) and the batch after it, or let the script skip that"
    end = f"The run ends at {MAX_EQUAL_FAILURES}, as a start would repeat it: {advice if step else 'mend the error'}"
    return f"{count} times in a row the ranks failed with the same error {place}: {reason}. {end}"
