"""The record of a step, the events of a run, and the sinks that take both.

The JSON of both is the format of a run folder. ``docs/monitoring.md`` describes it for people who read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

# The number of the format of a run folder. Readers of an older format refuse a newer one.
FORMAT = 1

Kind = Literal["forward", "backward", "gather", "reduce", "exchange", "update", "offload", "checkpoint", "evaluation"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# The kinds that are no work of training. Rates, such as tokens per second, leave them out.
OUTSIDE_TRAINING: tuple[Kind, ...] = ("checkpoint", "evaluation")
# The keys of a record's split: the kinds, and the rest of the step's time.
SPLIT = (*KINDS, "other")
TRAFFIC = ("gather_bytes", "reduce_bytes", "exchange_bytes", "disk_read_bytes", "disk_write_bytes")
Cause = Literal["compute", "offload", "other", "link"]
EventKind = Literal[
    "start", "resume", "change", "checkpoint", "skip", "restart", "eviction", "warning", "error", "trace", "end"
]


@dataclass(frozen=True)
class SlowestRank:
    """The rank that the others waited for in a step.

    Attributes:
        rank: Its number.
        seconds: How much longer than the median rank it took.
        cause: What it spent that time with.
        text: One sentence for people.
    """

    rank: int
    seconds: float
    cause: Cause
    text: str


@dataclass(frozen=True)
class StepMemory:
    """Bytes by state at the end of a step, the most over the ranks. The names are those of ``engine.memory()``.

    Attributes:
        device: Bytes in the memory of the device.
        cpu: Bytes in CPU memory, if the device is a GPU.
        nvme: Bytes on a disk.
        peak: The most bytes that the device has allocated so far; on CPUs, that the process has had in memory.
    """

    device: Mapping[str, int] = field(default_factory=dict)
    cpu: Mapping[str, int] = field(default_factory=dict)
    nvme: Mapping[str, int] = field(default_factory=dict)
    peak: int = 0


@dataclass(frozen=True)
class StepRecord:
    """One step of all ranks. Times are in seconds.

    Attributes:
        step: The number of the step: updates and skipped steps so far.
        time: When it ended, in Unix seconds.
        seconds: From the end of the previous step to the end of this one, the mean over the ranks.
        loss: What ``backward`` was given, before the loss scale; the mean over micro-steps and ranks. None if the loop
            called ``loss.backward()`` itself.
        lr: The learning rate of each param group that the step used.
        grad_norm: The norm of the mean gradient before clipping.
        loss_scale: The factor of the loss.
        skipped: Whether the step updated nothing, because the gradient was not finite.
        samples: The number of samples over all ranks, if it is known.
        tokens: The number of tokens over all ranks, if the first input has integers of 32 or 64 bits.
        flops: The model's floating-point operations in this step, over all ranks, without recomputation.
        mfu: ``flops`` per second of training over the peak rate of all ranks, if that is known.
        split: Where the time went, by the names in ``SPLIT``; the mean over the ranks. It adds up to ``seconds``.
        ranks: For "compute", "wait", "offload" and "other", the seconds of each rank.
        slowest: The rank that the others waited for, or None if no rank stands out.
        units: For "gather" and "reduce", the exposed wait of each unit, the mean over the ranks.
        traffic: The bytes that a rank sent and received or moved, by the names in ``TRAFFIC``; the mean over the ranks.
        memory: Bytes by state.
        user: The numbers that ``engine.log`` was given on rank 0.
    """

    step: int
    time: float
    seconds: float
    loss: float | None = None
    lr: Sequence[float] = ()
    grad_norm: float | None = None
    loss_scale: float = 1.0
    skipped: bool = False
    samples: int | None = None
    tokens: int | None = None
    flops: float | None = None
    mfu: float | None = None
    split: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    slowest: SlowestRank | None = None
    units: Mapping[str, Sequence[float]] = field(default_factory=dict)
    traffic: Mapping[str, float] = field(default_factory=dict)
    memory: StepMemory = StepMemory()
    user: Mapping[str, float] = field(default_factory=dict)

    @property
    def training_seconds(self) -> float:
        """Return the seconds without evaluations and checkpoints, which rates are computed by."""
        return self.seconds - sum(self.split.get(kind, 0.0) for kind in OUTSIDE_TRAINING)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types. Numbers that are not finite become null, for which JSON has no other way."""
        return {key: _finite(value) for key, value in vars(self).items()}


@dataclass(frozen=True)
class RunEvent:
    """Something that happened in a run, other than a step.

    Attributes:
        time: When, in Unix seconds.
        step: The last step before it.
        kind: What it is.
        text: One sentence for people.
        facts: Further JSON values, such as the seconds and the bytes of a checkpoint.
    """

    time: float
    step: int
    kind: EventKind
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the event as JSON types, with the facts beside the other keys."""
        values = {"time": self.time, "step": self.step, "kind": self.kind, "text": self.text}
        return {key: _finite(value) for key, value in {**self.facts, **values}.items()}


class Sink(Protocol):
    """Takes the records and the events of a run, on rank 0, on one thread of the monitor.

    If a method raises, the sink is closed with one warning, and training goes on.
    """

    def step(self, record: StepRecord) -> None:
        """Take the record of a step."""

    def event(self, event: RunEvent) -> None:
        """Take an event."""

    def close(self) -> None:
        """Finish: no record and no event follows."""


def _finite(value: Any) -> Any:
    """Return a tree of JSON types in which None stands for numbers that are not finite."""
    # Most values are numbers, and this runs at every step, so they are tested first.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return _finite(vars(value)) if isinstance(value, (SlowestRank, StepMemory)) else value
