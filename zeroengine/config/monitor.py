"""The sections that say what a run records about itself, and where."""

from __future__ import annotations

from typing import Annotated

from annotated_types import MaxLen
from pydantic import model_validator

from zeroengine.config.fields import AUTO, AboveZero, Auto, Folder, Positive, Section


class Monitor(Section):
    """The record of each step: where the time went, memory, loss, learning rates."""

    enabled: Annotated[bool | None, Auto(None)] = None
    """Record each step. "auto": if a folder, a trace or another output is asked for, here or by zero-launch."""
    folder: Annotated[Folder | None, AUTO] = None
    """Run folder that rank 0 writes, for zero-view. null: the folder of zero-launch --run-folder, if any."""
    peak_flops: Annotated[AboveZero | None, AUTO] = None
    """Peak FLOP/s of one rank in the compute dtype, for the MFU. null: known for common GPUs."""
    total_steps: Annotated[Positive | None, AUTO] = None
    """Number of steps that are planned, for the progress. null: the schedule's total_num_steps, if it has one."""


class TraceSteps(Section):
    """A timeline of some steps, of all ranks, for Perfetto or chrome://tracing."""

    steps: Annotated[list[Positive], MaxLen(2)] | None = None
    """First and last step of the timeline, such as [10, 12], or one step. null: no timeline."""
    folder: Annotated[Folder | None, AUTO] = None
    """Folder of the file trace-STEP.json. null: the run folder."""

    @model_validator(mode="after")
    def _check_order(self) -> TraceSteps:
        if self.steps is not None and self.steps != sorted(self.steps):
            raise ValueError(f"steps are the first and the last one; write {sorted(self.steps)}")
        return self
