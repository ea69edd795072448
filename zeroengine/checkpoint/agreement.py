"""Let the ranks agree, without waiting, that one of them asks for something at the end of a step.

[Note: Agreement without waiting]
At the end of some steps every rank begins an all-reduce of whether it asks, and reads the sum at the end of the step
after that. So all ranks learn at the same step that one of them has asked. The all-reduce travels over Gloo beside the
step in between, and nothing waits for it, unless a rank is a whole step behind. Short steps need no all-reduce each:
rank 0, which measures how long they take, adds to the sum how many steps later the next one begins.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zeroengine.comm.group import Group
from zeroengine.utils.process_finalizer import exits_with_error, finalize
from zeroengine.utils.process_groups import destroy_group, leave_to_threads

# At most so many steps lie between two all-reduces, since later steps may take longer.
MAX_STEPS = 100
# At the end, the other ranks have so long to reach the end of their last step.
LAST_REDUCE_TIMEOUT = timedelta(seconds=5)


@dataclass
class _Reduce:
    """The group, and the all-reduce under way: the number of ranks that ask, and the steps to the next all-reduce."""

    gloo_group: dist.ProcessGroup | None
    pending: tuple[dist.Work, torch.Tensor] | None = None

    def finish(self) -> None:
        """Wait for the all-reduce under way, since other ranks need this one; not for long, as one may have died."""
        pending, self.pending = self.pending, None
        group, self.gloo_group = self.gloo_group, None
        if pending is not None and group is not None:
            work, values = pending
            # After an error other ranks may never come to the all-reduce.
            if not exits_with_error():
                with contextlib.suppress(RuntimeError):
                    work.wait(LAST_REDUCE_TIMEOUT)
            if not work.is_completed():
                leave_to_threads(group, values)
                return
        if group is not None:
            destroy_group(group)


class StepAgreement:
    """Tells all ranks at the end of the same step that one asks. All ranks construct, query and close it together.

    Args:
        group: All ranks.
        purpose: What they agree on, for the message where a rank stalls.
        interval_s: So many seconds lie between two all-reduces, where steps are shorter.
    """

    def __init__(self, group: Group, purpose: str, interval_s: float) -> None:
        self._group, self._purpose, self._interval_s = group, purpose, interval_s
        # One rank alone needs no agreement, and the `fake` group has no other processes.
        self._reduce = _Reduce(group.new_group("gloo") if group.has_peers else None)
        self._steps_to_reduce = 1
        self._steps_since_reduce = 1
        self._last_reduce_time = time.monotonic()
        # A script may end without closing the engine. Other ranks still wait for this rank's part of the all-reduce.
        self.close = finalize(self, self._reduce.finish)

    def end_step(self, asks: bool) -> bool:
        """Return whether the ranks agree at the end of this step; the same answer on all ranks.

        Args:
            asks: Whether this rank asks.
        """
        if self._reduce.gloo_group is None:
            return asks
        # The all-reduce began a step ago, so its result is usually there and this returns at once.
        if self._reduce.pending is not None:
            work, values = self._reduce.pending
            with self._group.long_wait(self._purpose):
                work.wait()
            self._reduce.pending = None
            num_asking, self._steps_to_reduce = values.tolist()
            if num_asking:
                return True
        self._steps_to_reduce -= 1
        self._steps_since_reduce += 1
        if self._steps_to_reduce == 0:
            # Only rank 0 puts in a number, so the sum is its number. Ranks that measured for themselves would drift
            # apart.
            steps = self._steps_per_interval() if self._group.rank == 0 else 0
            values = torch.tensor([int(asks), steps], device="cpu")
            work = dist.all_reduce(values, group=self._reduce.gloo_group, async_op=True)
            assert work is not None
            self._reduce.pending = (work, values)
        return False

    def _steps_per_interval(self) -> int:
        """Return the number of steps in the interval, by the time of those since the last all-reduce."""
        now = time.monotonic()
        per_second = self._steps_since_reduce / max(now - self._last_reduce_time, 1e-9)
        self._steps_since_reduce, self._last_reduce_time = 0, now
        # The count starts at one or more. From zero it would be decremented below zero and never reach it again.
        return max(1, min(MAX_STEPS, int(per_second * self._interval_s)))
