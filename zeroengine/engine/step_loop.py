"""One step, from the first backward to the counters: which call may end it, and what its end consists of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroengine.engine.accumulation import ENGINE_STEP, OPTIMIZER_STEP
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.checkpointing import EngineCheckpoints
from zeroengine.engine.clipping import checked_norm
from zeroengine.engine.digests import StateDigests
from zeroengine.engine.model_forwards import ModelForwards
from zeroengine.engine.observers import build_observers
from zeroengine.engine.public_call import ALL_BUT_FORWARD, Inside, PublicCall
from zeroengine.engine.replay import ReplayTarget, StepReplay
from zeroengine.engine.replica_rounds import ReplicaRounds
from zeroengine.engine.run_progress import RunProgress, restore_progress, run_progress
from zeroengine.errors import SkippedStepsError, ZeroEngineError
from zeroengine.monitor.observer import Observer, overriding
from zeroengine.optim.caller_optimizer import has_own_step_hooks
from zeroengine.optim.step_result import StepResult
from zeroengine.runtime.pass_listener import PassListener
from zeroengine.runtime.step_losses import Weight
from zeroengine.schedule.events import GradientsBegan

log = logging.getLogger("zeroengine")


class StepLoop(PassListener):
    """Takes one step after another. It alone tells the parts of the loop what a backward does.

    The passes tell it of forwards and backwards. So it builds the parts that they belong to, and no forward or backward
    begins before it is complete.

    Args:
        make_parts: Builds the parts of the engine, whose passes tell their listener of forwards and backwards.
        progress: Where the run is, after a change; None: at its begin.

    Attributes:
        parts: The parts of the engine.
        checkpoints: Saves and loads for the engine.
        forwards: Observes the forwards of the model.
    """

    def __init__(self, make_parts: Callable[[PassListener], EngineParts], progress: RunProgress | None = None) -> None:
        self.parts = parts = make_parts(self)
        self._loop = parts.loop
        self._rounds, digests, target = ReplicaRounds(parts), StateDigests(parts), ReplayTarget.of_process()
        replay = None if target is None else StepReplay(parts, target)
        self.checkpoints = checkpoints = EngineCheckpoints(parts, self._rounds, digests, replay)
        observers = build_observers(parts, checkpoints)
        self.forwards = ModelForwards(parts, lambda: checkpoints.copy_bytes, observers)
        self._at_loss = overriding(observers, Observer.loss_noted)
        self._at_drop = overriding(observers, Observer.gradients_dropped)
        self._at_reduced = overriding(observers, Observer.gradients_reduced)
        self._at_micro_step_end = overriding(observers, Observer.micro_step_ended)
        self._at_step_end = overriding(observers, Observer.step_ended)
        for observer in overriding(observers, Observer.state_dict):
            checkpoints.register_stateful(f"observer.{type(observer).__name__}", observer)
        if parts.states.outliers is not None:
            checkpoints.register_stateful("skip_steps", parts.states.outliers)
        reports = parts.reports
        self._notes_losses = any((reports.monitor, reports.progress, parts.states.outliers))
        # The warnings that were given, which come once each.
        self._warnings: set[str] = set()
        if progress is not None:
            self._warnings = progress.warnings
            restore_progress(progress, parts, checkpoints)

    def progress(self) -> RunProgress:
        """Return where the run is, between two steps."""
        return run_progress(self.parts, self.checkpoints, self._warnings)

    # -- the events of forwards and backwards -----------------------------------------------------

    def begin_model_forward(self, args: Any, kwargs: Any) -> None:
        """Begin a forward of the whole model, unless it is nested in another one."""
        self.forwards.begin(args, kwargs)

    def end_model_forward(self) -> None:
        """End the outermost forward of the whole model."""
        self.forwards.end_by_hook()

    def count_forward(self) -> None:
        """Count a forward that a backward may follow."""
        self._loop.accumulation.begin_forward()

    def check_backward(self, wants_gradients: bool) -> None:
        """Report on the previous step. Refuse a backward after ``clip``, or while what it uses is offloaded."""
        required = ("parameters", "gradients") if wants_gradients else ("parameters",)
        self._loop.state_offloader.check_resident("a backward", required)
        # Every rank comes here, and the gradients of the previous step are still unchanged.
        self._loop.step_runner.await_and_report()
        self._end_after_skipped_steps()
        # A backward of frozen parameters adds nothing to the gradient, so clipping before it is no mistake.
        if wants_gradients:
            self._loop.clipping.check_backward()

    def check_frozen_backward(self) -> None:
        """Refuse a backward whose gradients are of parameters that joined the model after ``initialize``."""
        self._loop.foreign_parameters.check_trained()

    def begin_backward(self, *, by_engine: bool) -> GradientsBegan:
        """Count a backward that begins."""
        reducer = self.parts.passes.reducer
        drops_all = reducer.user_gradients.drops_all
        self._warn_of_dropped_micro_steps(drops_all)
        if drops_all:
            reducer.losses.forget_weights()
        accumulation = self._loop.accumulation
        is_last = accumulation.begin_backward()
        return GradientsBegan(by_engine, accumulation.reduces_gradients, is_last)

    def end_backward(self, num_calls: int) -> None:
        """Count a backward that has produced gradients."""
        self._loop.accumulation.end_backward(num_calls)

    def fail_backward(self, after_others: bool) -> None:
        """Note that the step has lost its gradients."""
        self._forget_step()
        self._loop.accumulation.fail_backward(after_others)

    def drop_gradients(self) -> None:
        """Note that the step in progress has no gradients so far."""
        self._forget_step()
        self._loop.accumulation.drop_gradients()
        self._loop.clipping.drop_gradients()

    def _forget_step(self) -> None:
        """Forget what the step in progress was given."""
        self.parts.passes.reducer.losses.forget()
        for observer in self._at_drop:
            observer.gradients_dropped()

    # -- calls of the user ------------------------------------------------------------------------

    def factor_of(self, weight: Any) -> Weight | None:
        """Return the weight of a loss as a factor of it; None: it has none.

        Raises:
            ZeroEngineError: ``weight`` is no number of at least 0, or the step has losses with a weight and others
                without.
        """
        weights = self.parts.passes.reducer.losses
        if weight is None and not weights.is_weighted:
            return None
        # The weights of a backward that raised go with its gradients.
        self.parts.passes.backward.finish()
        weights.check(weight)
        return weights.factor_of(weight)

    def note_loss(self, loss: torch.Tensor, weight: Weight | None) -> None:
        """Note the loss of a backward, before it is scaled."""
        if self._notes_losses:
            self.parts.passes.reducer.losses.note(loss, weight)
        for observer in self._at_loss:
            observer.loss_noted(loss, weight)

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop the gradients of the step so far, or set them to zero. See ``Engine.zero_grad``."""
        backward, accumulation = self.parts.passes.backward, self._loop.accumulation
        # This also ends a backward that raised, and drops its gradients.
        backward.finish()
        if not set_to_none and not accumulation.incomplete:
            nn.Module.zero_grad(self.parts.setup.model, set_to_none=False)
        elif accumulation.has_gradients:
            self._warn_of_dropped_micro_steps(True)
            backward.drop_gradients()
        else:
            # Many loops call zero_grad() directly after a step, when only the user can have left something.
            self.parts.passes.reducer.user_gradients.drop()

    def clip(self, max_norm: float, call: str) -> torch.Tensor:
        """Clip the step in progress to ``max_norm``, and return the norm. See ``Engine.clip_grad_norm_``."""
        # A bad argument raises before anything changes, so the step may continue.
        max_norm = checked_norm(max_norm, f"{call}: max_norm", zero=False)
        self.check(call)
        self._loop.accumulation.check_boundary(call)
        self._finish_gradients(call)
        norm = self._loop.step_runner.norm()
        self._loop.clipping.clip_once(max_norm)
        return norm

    def end_micro_step(self) -> bool | StepResult:
        """End a micro-step, and at the boundary the step. See ``Engine.step``."""
        self.check(ENGINE_STEP)
        # Every rank counts the same micro-steps, so all ranks take the same branch.
        if self._loop.accumulation.engine_step_updates():
            return self._end(ENGINE_STEP)
        self._loop.accumulation.end_micro_step()
        for observer in self._at_micro_step_end:
            observer.micro_step_ended(ranks_meet=False)
        return False

    def end_by_optimizer(self) -> None:
        """End a step for ``optimizer.step()``. See "Who ends a step" in ``engine/accumulation.py``."""
        self.check(OPTIMIZER_STEP)
        self._loop.accumulation.check_optimizer_step()
        self._end(OPTIMIZER_STEP)

    def average_replicas(self) -> bool:
        """End the round of ``local_steps``. See ``Engine.average_replicas``."""
        call, parts = "average_replicas()", self.parts
        if parts.states.outer_step is None:
            self.check(call)
            return False
        # The ranks exchange values below, so an error of one rank before that is an error of all.
        with parts.ranks.group.collective_errors("to average the replicas"):
            self.check(call)
            if self._loop.accumulation.has_gradients:
                raise ZeroEngineError(
                    f"{call} between the micro-steps of a step, whose gradients are those of other parameters: call it "
                    "after a step() that updated"
                )
        return self._rounds.end_round()

    def round_masters(self) -> None:
        """Let the masters take the rounded values of the model. See ``Engine.round_masters``."""
        call, parts = "round_masters()", self.parts
        # The ranks exchange values below, so an error of one rank before that is an error of all.
        with parts.ranks.group.collective_errors("to round the master weights"):
            self.check(call)
        # What replicas start from is rounded with their masters, and it is the same on all of them.
        self._rounds.end_round()
        parts.states.master_weights.round()
        self._rounds.restart((), loads_state=False)

    # -- the end of a step ------------------------------------------------------------------------

    def check(self, call: str) -> None:
        """Raise if a step cannot end here.

        Raises:
            ZeroEngineError: States are offloaded or half loaded, or ``call`` is inside ``gathered``, a CUDA graph or a
                backward.
        """
        parts, reducer = self.parts, self.parts.passes.reducer
        # Ending a backward that is still running would reduce only some of its gradients.
        PublicCall(call, "", ALL_BUT_FORWARD | Inside.CAPTURE, needs_store=True).check(parts)
        self.checkpoints.check_not_half_loaded(call)
        # If the last backward raised, this drops its gradients, which are incomplete.
        parts.passes.backward.finish()
        # The parameters are looked at again only where the loop clips by hand.
        user_gradients = reducer.user_gradients
        if self._loop.clipping.has_clipped and user_gradients.has_assigned and not user_gradients.drops_all:
            self._loop.clipping.check_not_clipped("assigning to param.grad")
        if reducer.take_assigned_gradients():
            self._loop.accumulation.note_assigned_gradients()

    def _finish_gradients(self, call: str) -> None:
        """Return with the gradients of this step reduced. If this raises, nothing has changed."""
        reducer = self.parts.passes.reducer
        # Inside ``no_sync`` the user asked to keep gradients unreduced.
        if not self._loop.accumulation.reduces_gradients:
            raise ZeroEngineError(
                f"{call} inside `with engine.no_sync()`: at the accumulation boundary the gradients are to be reduced. "
                "Leave the `with` before the last backward of a step."
            )
        # A parameter may be added at any time, so every update checks, which costs microseconds.
        self._loop.foreign_parameters.check()
        reducer.reduce_remaining()

    def _end(self, call: str) -> bool | StepResult:
        """Take a step on behalf of ``call``. Return the result of ``Engine.step``."""
        parts, loop, placement = self.parts, self._loop, self.parts.partition.placement
        self._finish_gradients(call)
        self._warn_of_dropped_gradients()
        # If anything up to here raises, nothing has changed, and the step may be called again.
        parts.passes.gatherer.begin_update()
        for observer in self._at_reduced:
            observer.gradients_reduced()
        self.forwards.end_step()
        # The counters advance on every rank, whether the update below is skipped or not.
        loop.accumulation.end_step(call)
        for observer in self._at_micro_step_end:
            observer.micro_step_ended(self._rounds.ends_with_this_step)
        if call == ENGINE_STEP:
            self._warn_of_unused_hooks()
        try:
            updated = loop.step_runner.run_step()
        finally:
            parts.passes.reducer.losses.forget()
        # The update itself changed the parameters' versions. Any later change is made outside of the engine.
        parts.passes.outside_writes.reset_baseline()
        self._rounds.end_step()
        if placement.disks:
            with parts.reports.timer.span("offload"):
                placement.evict()
        number = loop.step_runner.next_number - 1
        for observer in self._at_step_end:
            observer.step_ended(number)
        if not parts.states.optimizer.backend.is_async:
            self._end_after_skipped_steps()
        return updated

    def _end_after_skipped_steps(self) -> None:
        """Save, and end the run, if too many steps in a row were skipped. Every rank comes here.

        Raises:
            SkippedStepsError: They were.
        """
        section, runner = self.parts.setup.config.skip_steps, self._loop.step_runner
        if section is None or runner.num_skipped_in_a_row < section.at_most:
            return
        directory = self.parts.setup.config.checkpoint.directory
        # The next attempt of a loop that goes on even so is to end, too, but not to save again.
        if directory is not None and runner.num_skipped_in_a_row == section.at_most:
            self.checkpoints.save(directory, None, None, True, False)
        saved = (
            f"The last good step was saved in {directory}."
            if directory is not None
            else 'No checkpoint was saved: that takes "checkpoint": {"directory": ...}.'
        )
        raise SkippedStepsError(
            f"{runner.num_skipped_in_a_row} steps in a row were skipped (skip_steps.at_most), the last one step "
            f"{runner.next_number - 1}: the loss or the norm has left the usual range, or is not finite. {saved} Look "
            "at the data of these steps, lower the learning rate, or raise skip_steps.sigma."
        )

    def _warn_of_dropped_gradients(self) -> None:
        """Warn once of a step all of whose gradients the user has dropped, perhaps in each step."""
        reducer = self.parts.passes.reducer
        # Late gradients are deferred.
        dropped = reducer.assigned_digests and not any(
            any(grads.has_grad) or grads.deferred_grads for grads in reducer.gradients
        )
        if self._loop.accumulation.has_dropped or dropped:
            self._warn_once(
                "a step whose gradients were all dropped before it, by zero_grad() for example, changes no parameter. "
                "If that is not meant, call zero_grad() before the first backward of a step."
            )

    def _warn_of_dropped_micro_steps(self, drops_all: bool) -> None:
        """Warn once of gradients of earlier micro-steps that the user drops, perhaps before each micro-step."""
        accumulation = self._loop.accumulation
        if drops_all and accumulation.ended_micro_steps and not accumulation.has_dropped:
            self._warn_once(
                "zero_grad() between the micro-steps of a step has dropped the gradients of the earlier ones, as in "
                "plain PyTorch. If they are to add up, call it only after a step() that updated."
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            if self.parts.ranks.group.rank == 0:
                log.warning("%s", text)

    def _warn_of_unused_hooks(self) -> None:
        """Warn once that ``engine.step()`` does not call the step hooks of the optimizer that was passed in."""
        # Hooks may be registered after initialize(), so every step checks until the first warning.
        if has_own_step_hooks(self.parts.states.base_optimizer):
            self._warn_once(
                "the optimizer passed to initialize() has step hooks, which engine.step() does not call: call "
                "optimizer.step() in its place, which does"
            )
