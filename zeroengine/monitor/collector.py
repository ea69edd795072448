"""Collects what each rank measured, and feeds the sinks, on a thread of its own.

[Note: Nothing waits in a step]
A step ends with one entry in a queue. The thread of each rank reads the entry once the device has computed its values,
and takes part in a gather over a process group of CPUs that nothing else uses. Rank 0's thread makes the record. So a
record appears some time after its step, and no step waits for it. A rank that ends or stalls stops the records of all
ranks, with one warning, and not the training.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from zeroengine.monitor.record import EventKind, RunEvent, Sink
from zeroengine.monitor.summary import CommonFacts, RankRow, summarize
from zeroengine.monitor.timer import Interval, StepTimes
from zeroengine.monitor.trace import RankTimeline, measure_clock_offsets, write_trace
from zeroengine.utils.process_groups import destroy_group, run_collective
from zeroengine.utils.tensors import HostCopy

log = logging.getLogger("zeroengine")

# The seconds in which the records of the last steps must arrive when the engine ends, when the process exits without
# having ended the engine, and after an error.
CLOSE_TIMEOUT_S, EXIT_TIMEOUT_S, CLOSE_AFTER_ERROR_S = 20.0, 5.0, 2.0


@dataclass(frozen=True)
class RankStep:
    """What one rank knows at the end of a step. The thread reads what the device has not computed yet.

    Attributes:
        step: The number of the step.
        time: Its end, in Unix seconds.
        times: The seconds of each kind of work.
        numbers: Traffic, counts and memory, by the names of ``RankRow``.
        loss: The mean loss of this rank, and its weight in the mean over ranks; None if ``backward`` was given none.
        lr: The learning rates.
        loss_scale: The factor of the loss.
        grad_norm: Returns the norm, and may wait for it.
        skipped: Returns whether the step updated nothing, and may wait for that.
        user: The user's numbers by name.
    """

    step: int
    time: float
    times: StepTimes
    numbers: Mapping[str, float | None]
    loss: HostCopy | None
    lr: Sequence[float | HostCopy]
    loss_scale: float
    grad_norm: Callable[[], float]
    skipped: Callable[[], bool]
    user: Mapping[str, float | HostCopy]


@dataclass(frozen=True)
class TraceRequest:
    """The end of the traced steps.

    Attributes:
        path: The file that rank 0 writes.
        first_step: The first traced step.
        transfers: This rank's reads and writes of a disk: whether it is a write, the bytes, begin and end.
    """

    path: str
    first_step: int
    transfers: Sequence[tuple[bool, int, float, float]]


class Collector:
    """Collects the steps of all ranks. Every rank gives it the same steps in the same order.

    Args:
        group: A process group that nothing else uses and that can send CPU tensors. This object ends it. None: there is
            one rank.
        rank: This rank.
        units: The names of the units.
        slot_names: Those of the timer.
        peak_flops: The peak rate of one rank in FLOP/s, if it is known.
        sinks: Take the records and the events, on rank 0.

    Attributes:
        user: The user's numbers by name: of the step that has ended, until ``begin_step``, and then of the next one. If
            none follows, they belong to the end.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        units: Sequence[str],
        slot_names: Sequence[tuple[str, str]],
        peak_flops: float | None,
        sinks: Sink,
    ) -> None:
        self._group, self._rank, self._sinks = group, rank, sinks
        self._layout, self._slot_names, self._peak_flops = RankRow(units), slot_names, peak_flops
        self.user: dict[str, float | HostCopy] = {}
        # The step that has ended, to which the user may add numbers.
        self._ended: RankStep | None = None
        self._timeline: list[Interval] = []
        self._failed = False
        self._last_step = 0
        self._queue: SimpleQueue[RankStep | RunEvent | TraceRequest | None] = SimpleQueue()
        # A daemon: a rank that stalls must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="zeroengine-monitor", daemon=True)
        self._thread.start()

    def put(self, item: RankStep | RunEvent | TraceRequest) -> None:
        """Hand over a step, an event or the end of a trace. Return at once."""
        if isinstance(item, RankStep):
            self._last_step, self._ended = item.step, item
            return
        if isinstance(item, TraceRequest):
            # The timeline is that of the steps before it.
            self.begin_step()
        self._queue.put(item)

    def begin_step(self) -> None:
        """Record the step that has ended. From now on the user's numbers are those of the next step."""
        if self._ended is not None:
            self._queue.put(self._ended)
            self._ended, self.user = None, {}

    def close_at_exit(self) -> None:
        """Do as ``close``, where the process exits without having ended the engine."""
        # Python sets this before it exits with an error that nothing has handled.
        close = functools.partial(self.close, getattr(sys, "last_value", None), EXIT_TIMEOUT_S)
        if threading.current_thread() is threading.main_thread():
            close()
        else:
            # The garbage collector deletes an engine on any thread, such as those that would have to end here.
            threading.Thread(target=close, name="zeroengine-monitor-end", daemon=True).start()

    def close(self, error: BaseException | None, seconds: float | None = None) -> bool:
        """Finish the records of the steps so far, and close the sinks.

        Args:
            error: The error that ends the run. Other ranks may then be unable to finish theirs.
            seconds: How long to wait for the other ranks. None: ``CLOSE_TIMEOUT_S``.

        Returns:
            Whether everything was finished in time. If not, the thread still uses the process group, which stays.
        """
        self.begin_step()
        if self._rank == 0:
            kind: EventKind = "end" if error is None else "error"
            reason = f"after step {self._last_step}" if error is None else f"with {type(error).__name__}: {error}"
            # After an error the device may never compute them.
            user = {name: _number(value) for name, value in self.user.items()} if error is None else {}
            numbers = "".join(f", {name} {value:g}" for name, value in user.items())
            facts = {"user": user} if user else {}
            self._queue.put(RunEvent(time.time(), self._last_step, kind, f"the run ends {reason}{numbers}", facts))
        self._queue.put(None)
        seconds = CLOSE_AFTER_ERROR_S if error is not None else CLOSE_TIMEOUT_S if seconds is None else seconds
        self._thread.join(seconds)
        # Other ranks only send, so one warning is enough.
        if self._thread.is_alive() and self._rank == 0:
            log.warning("the last steps are not recorded: another rank has not sent its part in %g s", seconds)
            self._forward_events()
        self._sinks.close()
        is_done = not self._thread.is_alive()
        # The destruction of a group waits for its operations.
        if is_done and self._group is not None:
            group, self._group = self._group, None
            destroy_group(group)
        return is_done

    def _forward_events(self) -> None:
        """Hand over the events behind a step that waits for another rank. They concern this rank alone."""
        while not self._queue.empty():
            # The thread may take the last item first.
            with contextlib.suppress(Empty):
                if isinstance(item := self._queue.get_nowait(), RunEvent):
                    self._sinks.event(item)
        self._queue.put(None)

    # -- on the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            # Events concern rank 0 alone, so they are written even if other ranks are gone.
            if isinstance(item, RunEvent):
                self._sinks.event(item)
            elif not self._failed:
                try:
                    self._take_step(item) if isinstance(item, RankStep) else self._write_trace(item)
                except Exception as error:
                    self._fail(error)
            # This name would keep the last step's tensors alive while the thread waits.
            del item

    def _fail(self, error: Exception) -> None:
        self._failed = True
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        # Gloo's text names lines of its source code.
        if "gloo/transport" in reason:
            reason = "another rank has ended, or cannot be reached"
        text = f"no further steps are recorded: {reason}"
        log.warning("%s", text)
        if self._rank == 0:
            self._sinks.event(RunEvent(time.time(), 0, "warning", text))

    def _take_step(self, step: RankStep) -> None:
        seconds, timeline = step.times.wait()
        self._timeline += timeline
        loss, weight = (None, 0.0) if step.loss is None else step.loss.read()
        losses = {"has_loss": float(loss is not None), "loss": loss, "loss_weight": weight}
        row = self._layout.pack({**step.numbers, **losses}, seconds)
        rows = self._gather(torch.from_numpy(row))
        if rows is None:
            return
        norm = step.grad_norm()
        user = {name: _number(value) for name, value in step.user.items()}
        lr = [_number(rate) for rate in step.lr]
        facts = CommonFacts(step.step, step.time, lr, norm, step.loss_scale, step.skipped(), user)
        self._sinks.step(summarize(rows, self._layout, facts, self._peak_flops))

    def _gather(self, row: torch.Tensor) -> Any:
        """Return the rows of all ranks on rank 0, and None on the others."""
        if self._group is None:
            return row.numpy()[None]
        group, num_rows = self._group, self._group.size() if self._rank == 0 else 0
        rows = torch.empty(num_rows, row.numel(), dtype=row.dtype, device="cpu")
        run_collective(
            lambda sent, *received: dist.gather(sent, list(received) or None, group=group, group_dst=0, async_op=True),
            row,
            *rows,
        )
        return rows.numpy() if num_rows else None

    def _write_trace(self, request: TraceRequest) -> None:
        offsets, timelines = [0.0], [RankTimeline(self._timeline, request.transfers)]
        self._timeline = []
        if self._group is not None:
            offsets = measure_clock_offsets(self._group)
            gathered: list[Any] = [None] * self._group.size()
            dist.gather_object(timelines[0], gathered if self._rank == 0 else None, group=self._group, group_dst=0)
            timelines = gathered
        if self._rank == 0:
            num_events = write_trace(request.path, timelines, offsets, self._slot_names)
            text = f"the timeline that begins with step {request.first_step} is in {request.path}"
            facts = {"path": request.path, "events": num_events}
            self._sinks.event(RunEvent(time.time(), request.first_step, "trace", text, facts))


def _number(value: float | HostCopy) -> float:
    return value if isinstance(value, float) else float(value.read()[0])
