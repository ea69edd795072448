"""The observers of an engine, in their order."""

from __future__ import annotations

from functools import partial

from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.checkpointing import EngineCheckpoints
from zeroengine.engine.memory import measure_memory
from zeroengine.engine.replay import StepRecorder
from zeroengine.monitor.observer import Observer


def build_observers(parts: EngineParts, checkpoints: EngineCheckpoints) -> tuple[Observer, ...]:
    """Build what observes the steps of an engine, in the order in which each moment calls them. A collective.

    Args:
        parts: The parts of the engine.
        checkpoints: Saves and loads for the engine. It has the digests, and takes a step again for zero-replay.
    """
    config, loop, reports = parts.setup.config, parts.loop, parts.reports
    # Those with collectives are there on all ranks or on none, by the configuration and the number of ranks. So all
    # ranks run these collectives in this order.
    observers = (
        loop.sequences.comparison if parts.ranks.sums.has_peers else None,
        # The digests may raise, and the step in which they do is to be the last that is recorded and kept: it is the
        # one that zero-replay is to take again.
        StepRecords(parts, checkpoints) if reports.monitor is not None else None,
        StepRecorder(parts) if config.replay.keep is not None else None,
        checkpoints.digests if config.digests.every is not None else None,
        # The monitor may count the operations of a forward, so this comes after those that compute with its inputs.
        reports if reports.monitor is not None or reports.progress is not None else None,
        # It ends the process, so the digests that zero-replay compares have been taken.
        checkpoints.replay,
        # It saves what the others have left, and may end the process then.
        checkpoints if loop.save_on_signal is not None or loop.snapshots is not None else None,
    )
    return tuple(observer for observer in observers if observer is not None)


class StepRecords(Observer):
    """Hands each step to the monitor.

    Args:
        parts: The parts of the engine.
        checkpoints: Knows the memory that saves take.
    """

    def __init__(self, parts: EngineParts, checkpoints: EngineCheckpoints) -> None:
        self._parts, self._checkpoints = parts, checkpoints

    def step_ended(self, number: int) -> None:
        """Hand over the step."""
        parts, monitor, issued = self._parts, self._parts.reports.monitor, self._parts.loop.step_runner.issued_step
        assert monitor is not None and issued is not None
        memory = partial(measure_memory, parts, self._checkpoints.copy_bytes)
        monitor.end_step(issued, memory, parts.partition.placement, parts.partition.units)
