"""Times the kinds of work of a step.

[Note: Exclusive times]
At any time a rank does one kind of work: that of the innermost span, or "other" outside of all spans. Each beginning
and each end of a span is a mark, and the time since the previous mark belongs to the kind that was in progress. So the
times of a step add up to its wall time, whatever spans nest in whatever others. A span whose end is never reported,
because an error passed it, ends with the span around it.

[Note: Evaluation]
An evaluation is known by its forwards, which run without autograd. The loop does more than these: it loads data and
computes metrics between them. So all the time from the last work of training to the end of such a forward belongs to
"evaluation", except for checkpoints. What follows the last of them, until training goes on, is "other" again.

[Note: On a GPU]
There a mark is an event on the current stream. The time between two events is what the device spent, including what it
idled. A stream that waits for a collective does so between the marks around ``wait_stream``, so that span's time is the
exposed part of the collective. The host waits for no event in a step; the thread of the collector does later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch

from zeroengine.monitor.profiling import profile_range
from zeroengine.monitor.record import KINDS, Kind
from zeroengine.utils.torch_internals import profiler_enabled

_NOTHING: AbstractContextManager[Any] = nullcontext()
# A step of very many micro-steps has more marks than this. Then complete ones are added up before its end.
MAX_MARKS = 2048
# A slot, and the moment until which the time belongs to it: seconds of the host, or an event of a GPU.
_Mark = tuple[int, Any]


class Interval(NamedTuple):
    """A time in which one kind of work was in progress: see ``Timer.slot_names``. In seconds of ``perf_counter``."""

    slot: int
    begin: float
    end: float


class StepTimes:
    """The times of one step. ``wait`` returns them, on any thread.

    Args:
        recorder: Adds up the marks.
        marks: The marks of the step that are not added up yet.
        seconds: Seconds by slot, without those of ``marks``.
        timeline: Takes the step's intervals, if the step is traced.
    """

    def __init__(
        self, recorder: _MarkRecorder, marks: list[_Mark], seconds: list[float], timeline: list[Interval] | None
    ) -> None:
        self._recorder, self._marks, self._seconds, self._timeline = recorder, marks, seconds, timeline

    def wait(self) -> tuple[list[float], list[Interval]]:
        """Return the seconds of each slot, and the intervals of a traced step. Wait until the device has run it."""
        if self._marks:
            marks, self._marks = self._marks, []
            self._recorder.add_up(marks, self._seconds, self._timeline)
        return self._seconds, self._timeline or []


class Timer:
    """Attributes the time of a rank to kinds of work and units.

    Args:
        units: The names of the units.
        device: The device that the rank computes on. None: the timer is off, and costs nothing.

    Attributes:
        enabled: Whether it is on.
        slot_names: The kind and the unit that each of ``StepTimes`` belongs to. The unit is empty for work that
            concerns no single unit. The first slot is that of "other".
        tracing: Whether the intervals of this step are kept.
        received: The bytes that collectives brought to this rank in this step, by kind.
    """

    def __init__(self, units: Sequence[str] = (), device: torch.device | None = None) -> None:
        self.enabled, self.tracing = device is not None, False
        self.slot_names = [("other", ""), *((kind, unit) for kind in KINDS for unit in ("", *units))]
        self.received = {"gather": 0, "reduce": 0, "exchange": 0}
        self._slots = {names: slot for slot, names in enumerate(self.slot_names)}
        self._on_cuda = device is not None and device.type == "cuda"
        # The work in progress, and that of the spans around it, the outermost first.
        self._slot, self._outer_slots = 0, list[int]()
        if device is not None:
            self._recorder = _MarkRecorder(len(self.slot_names), clock_of(device))

    def span(self, kind: Kind, unit: str = "", label: str = "") -> AbstractContextManager[Any]:
        """Return a context whose time belongs to ``kind`` and ``unit``.

        Args:
            kind: The kind of work.
            unit: The unit that it is for, if it is for one.
            label: The name that profilers show before the unit's. Empty: they show nothing.
        """
        named = profile_range(label, unit) if label else _NOTHING
        if not self.enabled:
            return named
        return _Span(self, self._slots.get((kind, unit)) or self._slots[kind, ""], named)

    @property
    def is_watched(self) -> bool:
        """Whether a span with a label does anything. Where many are short, asking this before costs less."""
        return self.enabled or profiler_enabled()

    def begin(self, kind: Kind | Literal["other"], unit: str = "") -> int:
        """Begin a span whose end is known elsewhere. Return a number for ``end``."""
        return self._push(self._slots[kind, unit]) if self.enabled else -1

    def end(self, depth: int) -> None:
        """End a span of ``begin``, and all spans inside that have not ended. A second call does nothing."""
        if 0 <= depth < len(self._outer_slots) and self._marks():
            self._recorder.mark(self._slot)
            self._slot = self._outer_slots[depth]
            del self._outer_slots[depth:]

    def note_training(self) -> None:
        """Note the end of work of training: time before this is no evaluation. See the note above."""
        if self.enabled and self._marks():
            self._recorder.mark(self._slot)
            self._recorder.keep()

    def note_evaluation(self) -> None:
        """Attribute the time since the last work of training to "evaluation", except for checkpoints."""
        if self.enabled and self._marks():
            self._recorder.mark(self._slot)
            self._recorder.move_since_kept(self._slots["evaluation", ""], self._slots["checkpoint", ""])

    def trace(self, keeps: bool) -> None:
        """Keep the intervals of the next step, or do not. Call it between steps."""
        if keeps != self.tracing:
            self.tracing = keeps
            self._recorder.trace(keeps)

    def name_backward(self, unit: str) -> None:
        """Attribute the backward since the last call to ``unit``, whose gradients are complete, in the timeline."""
        if self.tracing and self._marks():
            self._recorder.mark(self._slot)
            self._recorder.rename(self._slots["backward", ""], self._slots["backward", unit])

    def _push(self, slot: int) -> int:
        if not self._marks():
            return -1
        self._recorder.mark(self._slot)
        self._outer_slots.append(self._slot)
        self._slot = slot
        return len(self._outer_slots) - 1

    def _marks(self) -> bool:
        # An event that a CUDA graph captures has no time.
        return not (self._on_cuda and torch.cuda.is_current_stream_capturing())

    def count(self, kind: Kind, nbytes: int) -> None:
        """Count bytes that a collective brings to this rank."""
        if self.enabled:
            self.received[kind] += nbytes

    def end_step(self) -> StepTimes:
        """Return the times since the end of the previous step, and begin the next step."""
        self._recorder.mark(self._slot)
        return self._recorder.take()


class _Span:
    __slots__ = ("_depth", "_named", "_slot", "_timer")

    def __init__(self, timer: Timer, slot: int, named: AbstractContextManager[Any]) -> None:
        self._timer, self._slot, self._named = timer, slot, named

    def __enter__(self) -> None:
        self._depth = self._timer._push(self._slot)
        if self._named is not _NOTHING:
            self._named.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._named is not _NOTHING:
            self._named.__exit__(*error)
        self._timer.end(self._depth)


class HostClock:
    """The clock of the host: a moment is a number of seconds of ``perf_counter``."""

    def now(self) -> float:
        """Return this moment."""
        return time.perf_counter()

    def is_over(self, moment: float) -> bool:
        """Return whether a moment has come."""
        return True

    def wait_seconds(self, before: float, moment: float) -> float:
        """Return the seconds from ``before`` to ``moment``."""
        return moment - before

    def host_time(self, moment: float) -> float:
        """Return a moment in seconds of ``perf_counter``."""
        return moment

    def free(self, moment: float) -> None:
        """Do nothing."""


class DeviceClock:
    """The clock of a GPU: a moment is an event on the current stream."""

    def __init__(self) -> None:
        # Events that may be recorded again. The thread that reads the times returns them.
        self._free: deque[torch.cuda.Event] = deque()
        # The device has nothing to do when an engine is made, so its clock can be related to the host's here.
        self._origin = self.now()
        self._origin.synchronize()
        self._origin_time = time.perf_counter()

    def now(self) -> torch.cuda.Event:
        """Record an event."""
        # A thread that waits for a blocking event leaves its core to others.
        event = self._free.popleft() if self._free else torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event

    def is_over(self, event: torch.cuda.Event) -> bool:
        """Return whether the device has come to an event."""
        return bool(event.query())

    def wait_seconds(self, before: torch.cuda.Event, event: torch.cuda.Event) -> float:
        """Wait for ``event``, and return the seconds since ``before``."""
        event.synchronize()
        # Events of two streams may be out of order.
        return max(float(before.elapsed_time(event)), 0.0) / 1000

    def host_time(self, event: torch.cuda.Event) -> float:
        """Return when the event was, in seconds of ``perf_counter``."""
        return self._origin_time + float(self._origin.elapsed_time(event)) / 1000

    def free(self, event: torch.cuda.Event) -> None:
        """Let an event be recorded again."""
        self._free.append(event)


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """Return the clock that computations on ``device`` are timed by."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class _MarkRecorder:
    """The marks of a step, each with the slot that the time before it belongs to."""

    def __init__(self, num_slots: int, clock: HostClock | DeviceClock) -> None:
        self._num_slots, self._clock = num_slots, clock
        self._seconds = [0.0] * num_slots
        self._traces = False
        # The end of the last traced interval; 0 if the last step was not traced.
        self._traced_until = 0.0
        # The first mark begins the step.
        self._marks: list[_Mark] = [(0, clock.now())]
        self._num_renamed = 1
        # The marks that ``move_since_kept`` must not change.
        self._num_kept = 1
        # The marks at which complete ones are added up.
        self._max_marks = MAX_MARKS

    def mark(self, slot: int) -> None:
        """Give the time since the last mark to ``slot``."""
        self._marks.append((slot, self._clock.now()))
        if len(self._marks) > self._max_marks and not self._traces:
            self._add_up_complete()

    def _add_up_complete(self) -> None:
        # A host that is ahead of the device never sees its latest mark complete, so the older half is looked at. A look
        # takes a microsecond, so the next one comes many marks later.
        # The work of a loop that never calls the whole model is never noted, so its slots are final at some point.
        if len(self._marks) > 1.5 * MAX_MARKS:
            self.keep()
        # Marks whose slots may still change are not added up.
        middle = min(len(self._marks) // 2, self._num_kept - 1)
        if middle > 0 and self._clock.is_over(self._marks[middle][1]):
            self.add_up(self._marks[: middle + 1], self._seconds, None)
            del self._marks[:middle]
            self._num_kept -= middle
        self._max_marks = len(self._marks) + MAX_MARKS // 2

    def keep(self) -> None:
        """Keep the time up to the last mark in its slots."""
        self._num_kept = len(self._marks)

    def move_since_kept(self, slot: int, excepted: int) -> None:
        """Give the time since the last ``keep`` to ``slot``, except for that of ``excepted``, and keep it there."""
        for index in range(self._num_kept, len(self._marks)):
            if self._marks[index][0] != excepted:
                self._marks[index] = slot, self._marks[index][1]
        self.keep()

    def rename(self, slot: int, new_slot: int) -> None:
        """Give the intervals of ``slot`` since the last call to ``new_slot``. The sum of a kind does not change."""
        for index in range(self._num_renamed, len(self._marks)):
            if self._marks[index][0] == slot:
                self._marks[index] = new_slot, self._marks[index][1]
        self._num_renamed = len(self._marks)

    def trace(self, keeps: bool) -> None:
        """Keep the intervals from now on, or do not."""
        self._traces = keeps

    def take(self) -> StepTimes:
        """Return the times since the last call."""
        times = StepTimes(self, self._marks, self._seconds, [] if self._traces else None)
        self._seconds, self._num_renamed, self._num_kept = [0.0] * self._num_slots, 1, 1
        self._marks, self._max_marks = [self._marks[-1]], MAX_MARKS
        return times

    def add_up(self, marks: list[_Mark], seconds: list[float], timeline: list[Interval] | None) -> None:
        """Wait for the marks, and add the time before each one to its slot. All but the last mark are free then."""
        before = marks[0][1]
        if timeline is None:
            self._traced_until = 0.0
        for slot, moment in marks[1:]:
            elapsed = self._clock.wait_seconds(before, moment)
            seconds[slot] += elapsed
            if timeline is not None:
                # A day after the origin CUDA's float32 milliseconds are 8 ms apart, so only the first interval is
                # placed by it, and each other one by its predecessor.
                begin = self._traced_until or self._clock.host_time(before)
                self._traced_until = begin + elapsed
                timeline.append(Interval(slot, begin, self._traced_until))
            self._clock.free(before)
            before = moment
