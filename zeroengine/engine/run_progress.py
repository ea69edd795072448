"""Where a run is between two steps, for the parts that go on after a change of the partitioning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.checkpointing import EngineCheckpoints
from zeroengine.engine.step import StepCounts

# Begins the names of the states of observers. ``Engine.change`` makes new observers.
OBSERVER = "observer."


@dataclass
class RunProgress:
    """What the parts of an engine know of the run, beside the states of the model.

    Attributes:
        counts: The steps.
        micro_steps: As of ``Accumulation``, like the next one.
        last_update_by: The call that ended the last step.
        boundary: What was declared of the next backward.
        max_norm: The largest norm of the gradient; None: that of the configuration.
        scaler: The state of the loss scale.
        checkpoints: The objects whose state is part of checkpoints, and what the last load left.
        observers: The states of observers, by their names in checkpoints.
        warnings: The warnings that were given.
    """

    counts: StepCounts
    micro_steps: int
    last_update_by: str | None
    boundary: bool | None
    max_norm: float | None
    scaler: dict[str, Any]
    checkpoints: dict[str, Any]
    observers: dict[str, dict[str, Any]]
    warnings: set[str]


def run_progress(parts: EngineParts, checkpoints: EngineCheckpoints, warnings: set[str]) -> RunProgress:
    """Return where the run is. It holds no part of the engine that depends on how the model is partitioned."""
    loop, objects = parts.loop, checkpoints.objects()
    stateful = objects["stateful"]
    observers = {name: stateful.pop(name).state_dict() for name in list(stateful) if name.startswith(OBSERVER)}
    return RunProgress(
        loop.step_runner.counts(),
        loop.accumulation.micro_steps,
        loop.accumulation.last_update_by,
        loop.accumulation.boundary,
        loop.clipping.max_norm,
        parts.passes.scaler.state_dict(),
        objects,
        observers,
        warnings,
    )


def restore_progress(progress: RunProgress, parts: EngineParts, checkpoints: EngineCheckpoints) -> None:
    """Let new parts of the engine go on there."""
    loop, config = parts.loop, parts.setup.config
    loop.step_runner.restore_counts(progress.counts)
    loop.accumulation.micro_steps, loop.accumulation.last_update_by = progress.micro_steps, progress.last_update_by
    loop.accumulation.boundary = progress.boundary
    if progress.max_norm is not None:
        loop.clipping.max_norm = progress.max_norm
    if config.scales_loss:
        parts.passes.scaler.load_state_dict(progress.scaler)
    checkpoints.restore_objects(progress.checkpoints, progress.observers)
