"""The end of an engine, by ``close`` or ``release``, and what takes the place of its parts."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from typing import Any, NoReturn

from zeroengine.engine import temporary_offload
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.call_checks import NUM_SHOWN, unset_names
from zeroengine.engine.checkpointing import EngineCheckpoints
from zeroengine.engine.public_call import ALL_BUT_FORWARD, PublicCall
from zeroengine.errors import CheckpointError, DivergenceError, ZeroEngineError
from zeroengine.utils.formats import listed
from zeroengine.utils.process_finalizer import keep_until_process_ends

log = logging.getLogger("zeroengine")


class EndedEngineError(ZeroEngineError, AttributeError):
    """An engine, or its optimizer, was used after its end. ``hasattr`` and ``getattr`` with a default work as ever."""


class EndedParts:
    """Takes the place of all parts of an engine that has ended: counters can be read, and everything else raises.

    It is each of its own parts, so that the engine finds its counters where they were. No part is kept in memory.

    Args:
        reason: Why the engine cannot be used, for messages.
        parts: The parts.
    """

    has_ended = True

    def __init__(self, reason: str, parts: EngineParts) -> None:
        self._reason, runner = reason, parts.loop.step_runner
        self.num_updates, self.num_skipped, self.grad_norm = runner.num_updates, runner.num_skipped, runner.grad_norm
        self.micro_steps, self.max_norm = parts.loop.accumulation.micro_steps, parts.loop.clipping.max_norm
        self.current = parts.states.lr_schedule.current
        self.loop = self.accumulation = self.step_runner = self.clipping = self.states = self.lr_schedule = self

    def await_result(self) -> None:
        """Return at once: the last step is counted."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raise EndedEngineError: only counters can be read."""
        # Python's own protocols, such as copy and pickle, look up such names and expect AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        raise EndedEngineError(self._reason)


def ended_by(call: str, parts: EngineParts) -> EndedParts:
    """Return what takes the place of ``parts`` after the public call that ended the engine."""
    return EndedParts(
        f"this engine has ended, by engine.{call}. Its model is an ordinary one now: use engine.module, or pass that "
        "to zeroengine.initialize() for a new engine.",
        parts,
    )


def ended_in_change(parts: EngineParts) -> EndedParts:
    """Return what takes the place of ``parts`` while ``Engine.change`` moves states, and after it has failed."""
    return EndedParts(
        "this engine has ended, because engine.change() failed while states moved. Make a model and an engine anew, "
        "and load a checkpoint.",
        parts,
    )


# The engines of this process. In each child that it forks they have ended and free nothing, garbage or not: see "Forked
# children" in utils/process_finalizer.py.
engines: weakref.WeakSet[Any] = weakref.WeakSet()


def _leave_engines_to_parent() -> None:
    # A weak set may lose members while it is iterated, so a list is taken first.
    for engine in list(engines):
        # What is never freed runs no destructor, such as those of process groups, which wait for threads.
        keep_until_process_ends(engine.leave_to_parent())
    engines.clear()


os.register_at_fork(after_in_child=_leave_engines_to_parent)


def of_parent(parts: EngineParts) -> EndedParts:
    """Return what takes the place of ``parts`` in a forked child."""
    return EndedParts(
        f"this engine belongs to process {os.getppid()}, which forked this one ({os.getpid()}): use it there, and pass "
        "values to forked processes.",
        parts,
    )


def prepare_release(parts: EngineParts, checkpoints: EngineCheckpoints) -> None:
    """Check, on every rank, that nothing keeps ``Engine.release`` from leaving an ordinary model.

    Raises:
        ZeroEngineError: Something does. See ``Engine.release``. Nothing has changed.
    """
    # A save that failed in the background is an error while the engine can still save again.
    checkpoints.wait()
    with PublicCall("release()", "to release the model", ALL_BUT_FORWARD).on_all_ranks(parts):
        unset = unset_names(parts.partition.units)
        if unset:
            raise ZeroEngineError(
                f"release(): these parameters were built under meta_init(values=False) and have no values yet: "
                f"{listed(unset, NUM_SHOWN)}. Load them with engine.load_weights(path) before, or end the engine with "
                "close(), which leaves them as NaN."
            )
    parts.partition.restoration.check_room()
    _compare_writes(parts)


def prepare_close(parts: EngineParts) -> None:
    """Decide whether ``Engine.close`` leaves partitioned parameters without values.

    Raises:
        ZeroEngineError: The engine is in the midst of its work. Nothing has changed.
    """
    error, divergence = sys.exc_info()[1], parts.ranks.group.divergence.message
    # Training may run inside an `except`, as a retry does. Its error does not concern this engine.
    if divergence or (error is not None and error is not parts.error_at_start):
        reason = "DivergenceError" if divergence else type(error).__name__
        parts.partition.restoration.leave_partitioned(f"the engine was closed after {reason}")
        # The other ranks may not end their streams of the weights now.
        parts.passes.gatherer.refuse_calls = None
        return
    try:
        # A rank that closes while others go on finds out, and they do, at every stage.
        with PublicCall("close()", "to close the engine", ALL_BUT_FORWARD, ()).on_all_ranks(parts):
            pass
    except DivergenceError as error_of_others:
        # Ranks in different calls can go on. Otherwise another rank has ended or failed, and none can.
        if not parts.ranks.group.divergence.message:
            raise
        log.warning("close(): %s", error_of_others)
        parts.partition.restoration.leave_partitioned("the engine was closed after a DivergenceError")
        return
    try:
        parts.partition.restoration.check_room()
        # Whole parameters stay those of this rank, so the ranks need not meet for them.
        if any(unit.is_releasable for unit in parts.partition.units):
            _compare_writes(parts)
    except ZeroEngineError as error_of_all:
        parts.partition.restoration.leave_partitioned(f"the engine was closed, and {error_of_all}")


def _compare_writes(parts: EngineParts) -> None:
    """Raise ``DivergenceError`` if ranks wrote different values, of which whole parameters would be a mixture."""
    for unit in parts.partition.units:
        unit.collect_writes()
    parts.passes.outside_writes.compare()


def end_parts(parts: EngineParts, checkpoints: EngineCheckpoints, call: str) -> None:
    """Finish what is in progress, leave an ordinary model, and free threads and files, whatever fails.

    Args:
        parts: The parts of the engine.
        checkpoints: Saves and loads for the engine.
        call: The public call that ends the engine.
    """
    try:
        if parts.loop.state_offloader.has_offloaded_states:
            temporary_offload.reload(parts)
        # The signal handlers are restored first, because a later signal is no longer the engine's.
        if parts.loop.save_on_signal is not None:
            parts.loop.save_on_signal.close()
        # A save in the background still reads states and exchanges messages, so it must end first. If it failed, all
        # ranks know, and still restore the parameters.
        checkpoints.close()
        # After an error the device may never finish the last step.
        if sys.exc_info()[0] is None and not parts.ranks.group.divergence.message:
            parts.loop.step_runner.final_report()
        if not parts.partition.restoration.reason_not_whole:
            checkpoints.rounds.end_round()
    except CheckpointError:
        raise
    except BaseException as error:
        # The other ranks may not have failed, and a collective would then wait for them forever.
        parts.partition.restoration.leave_partitioned(f"{call} failed: {error}")
        raise
    finally:
        parts.setup.undo.close()
