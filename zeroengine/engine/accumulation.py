"""Counts the backwards and micro-steps of the step in progress, and decides which call may end it.

[Note: Who ends a step]
A training loop ends its steps in one of two ways, each with its own count:

- `engine.step()` after every micro-step, as in DeepSpeed. The `gradient_accumulation_steps`-th call updates.
- `optimizer.step()` once, after `gradient_accumulation_steps` backwards, as in plain PyTorch. It always updates.

Both calls in one step are an error. With `"gradient_accumulation_steps": "manual"` nothing is counted: either call
updates after any number of backwards. But after `set_gradient_accumulation_boundary(False)`, `engine.step()` ends a
micro-step, as in DeepSpeed.

Before the first update the engine does not know which way the loop uses. Only the start of the reduction depends on the
guess: gradients that a backward does not reduce are reduced when the step ends.
"""

from __future__ import annotations

import logging

from zeroengine.engine.call_checks import check_trains
from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.reducer import Reducer
from zeroengine.utils.formats import counted

ENGINE_STEP, OPTIMIZER_STEP = "engine.step()", "optimizer.step()"
MANUAL_MODE = '"gradient_accumulation_steps": "manual"'
# The warning comes after this many forwards and backwards beyond gradient_accumulation_steps. A loop that occasionally
# evaluates or probes gradients stays below it.
FORGOTTEN_AFTER = 8

log = logging.getLogger("zeroengine")


class Accumulation:
    """The progress of one step, from its first backward to its update.

    Args:
        micro_steps_per_step: The value of `gradient_accumulation_steps`; None in manual accumulation.
        rank: This rank. Rank 0 logs the warning about a forgotten step.
        reducer: Has the gradients.

    Attributes:
        micro_steps: Number of micro-steps in the whole run.
        backwards: Number of backwards that produced gradients since the last update.
        ended_micro_steps: Number of calls of `engine.step()` since the last update.
        incomplete: Whether a backward raised after others of the same step, so that gradients are missing.
        has_dropped: Whether all gradients of the step so far were dropped.
        reduces_gradients: Whether backwards reduce gradients over the ranks; False inside ``no_sync``.
        last_update_by: The call that ended the last step; None before the first.
        boundary: The argument of ``set_boundary`` for this step; None before it is called.
    """

    def __init__(self, micro_steps_per_step: int | None, rank: int, reducer: Reducer) -> None:
        self.micro_steps = self.backwards = self.ended_micro_steps = 0
        self.incomplete = self.has_dropped = False
        self.reduces_gradients = True
        self._per_step, self._rank = micro_steps_per_step, rank
        # The number of backwards since the last call of either step(). A step() without a backward is refused.
        self._new_backwards = 0
        # The number of forwards since then that a backward followed, and the number of these inside `no_sync`.
        self._passes = 0
        self._local_passes = 0
        # The number of forwards of the whole model since the last backward began, and between that backward and the
        # previous one. They distinguish several losses of one forward from several micro-steps.
        self._forwards = 0
        self._forwards_before_backward = 0
        self.last_update_by: str | None = None
        self.boundary: bool | None = None
        self._warned = False
        self._reducer = reducer

    @property
    def has_new_gradients(self) -> bool:
        """Whether there were backwards since the last call of either `step()`."""
        return self._new_backwards > 0

    @property
    def has_gradients(self) -> bool:
        """Whether the step in progress has any gradients, or has lost some in a backward that raised."""
        return ((self.backwards > 0 or self.ended_micro_steps > 0) and not self.has_dropped) or self.incomplete

    @property
    def micro_steps_in_step(self) -> int:
        """The number of micro-steps of the step in progress so far."""
        by_engine_step = self.ended_micro_steps or self.last_update_by == ENGINE_STEP
        return self.ended_micro_steps + self.has_new_gradients if by_engine_step else self.backwards

    # -- forwards and backwards -------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Note a forward of the whole model that a backward may follow."""
        self._forwards += 1

    def begin_backward(self) -> bool:
        """Count a backward that begins. Return whether it is probably the last one before an update.

        Raises:
            ZeroEngineError: Gradients of this step are missing.
        """
        self.check_complete()
        self._forwards_before_backward, self._forwards = self._forwards, 0
        if self._forwards_before_backward:
            self._passes += 1
            # Inside `no_sync` gradients add up on purpose.
            self._local_passes += not self.reduces_gradients
            self._warn_of_forgotten_step()
        # Gradients are reduced while the last backward of a step computes. A wrong guess costs only time, because
        # `reduce_remaining` reduces the rest at the end of the step.
        if self._per_step is None:
            return self.boundary is True
        if self.boundary is None and self.last_update_by == OPTIMIZER_STEP:
            # Backwards are counted, because optimizer.step() is called only once, after the last of them.
            return self.backwards + 1 >= self._per_step
        return self._next_engine_step_updates

    def end_backward(self, num_calls: int) -> None:
        """Count a backward that has produced gradients.

        Args:
            num_calls: The number of `loss.backward()` calls, with no forward in between. They are separate micro-steps
                if as many forwards came before them, and otherwise several losses of one micro-step.
        """
        # Several losses of one forward are several calls but one micro-step, so the number of forwards is the limit.
        num_backwards = max(1, min(num_calls, self._forwards_before_backward))
        self.has_dropped = False
        self.backwards += num_backwards
        self._new_backwards += num_backwards
        # begin_backward has already counted the first of these passes.
        self._passes += num_backwards - 1

    def note_assigned_gradients(self) -> None:
        """Count gradients that user code assigned, for a step without a backward."""
        self.has_dropped = False
        if not self._new_backwards:
            self.backwards += 1
            self._new_backwards += 1

    def fail_backward(self, after_others: bool) -> None:
        """Note a backward that raised: the step lacks its gradients, and the gradients before it were dropped.

        Args:
            after_others: Whether other backwards produced gradients that are not counted yet.
        """
        # If the first backward of a step fails, nothing that was counted is lost, so the loop may simply try again.
        self.incomplete = self.incomplete or self.backwards > 0 or after_others

    def check_complete(self) -> None:
        """Check that no gradients of the step are missing.

        Raises:
            ZeroEngineError: A backward of this step raised after others, so gradients of the step are missing.
        """
        if self.incomplete:
            raise ZeroEngineError(
                "a backward raised in the middle of a step, and the gradients that the step had before were dropped "
                "with its own. Call engine.zero_grad() on every rank, and repeat the step from its first micro-step."
            )

    def drop_gradients(self) -> None:
        """Note that the gradients of the step so far were dropped. Its backwards and micro-steps still count.

        A step that lacks gradients, because a backward raised, starts again.
        """
        if self.incomplete:
            self.restart_step()
        else:
            self.has_dropped = True

    def restart_step(self) -> None:
        """Return to the start of the step in progress, without gradients."""
        # The ended micro-steps will be repeated, and must not be counted twice.
        self.micro_steps -= self.ended_micro_steps
        self._start_step()

    def _start_step(self) -> None:
        self.backwards = self._new_backwards = self.ended_micro_steps = 0
        self._passes = self._local_passes = 0
        self.incomplete = self.has_dropped = False
        self.boundary = None

    def _warn_of_forgotten_step(self) -> None:
        # Gradients add up on purpose inside `no_sync`, and where the loop sets the boundary of this step, so such
        # passes are no sign of a missing step().
        num_passes = self._passes - self._local_passes
        if self._per_step is None or self.boundary is not None or self._warned:
            return
        if num_passes <= self._per_step + FORGOTTEN_AFTER:
            return
        # The loop repeats the same mistake in every step, so one warning is enough.
        self._warned = True
        if self._rank == 0:
            log.warning(
                "%d forwards and backwards without a step(): their gradients add up, and no parameter has changed "
                "since. Call engine.step() after each micro-step, or optimizer.step() after every "
                "gradient_accumulation_steps (%d) backwards. If adding up is what you want, write %s.",
                num_passes,
                self._per_step,
                MANUAL_MODE,
            )

    # -- the boundary -----------------------------------------------------------------------------

    @property
    def _next_engine_step_updates(self) -> bool:
        """Whether `engine.step()` would update now, if there were gradients."""
        if self.boundary is not None:
            return self.boundary
        # In manual accumulation every step() updates, as in plain PyTorch.
        return self._per_step is None or self.ended_micro_steps + 1 >= self._per_step

    def is_boundary(self) -> bool:
        """Return whether the micro-step in progress ends with an update."""
        if self._per_step is None or self.boundary is not None or self._next_engine_step_updates:
            return self._next_engine_step_updates
        if self.ended_micro_steps or self.last_update_by == ENGINE_STEP:
            return False
        # If optimizer.step() ends steps, the micro-step in progress is that of the last forward. Before the first
        # update, two losses of one forward may still be a micro-step that engine.step() will end.
        ended = self.backwards if self.last_update_by == OPTIMIZER_STEP else self._passes
        return ended + bool(self._forwards) >= self._per_step

    def set_boundary(self, boundary: bool | None, override: bool) -> None:
        """Declare whether the next backward is the last one before an update. See the method of ``Engine``.

        Args:
            boundary: Whether it is. This holds until an update. None takes back what was declared.
            override: Whether this decides although micro-steps are counted.

        Raises:
            ZeroEngineError: Micro-steps are counted, and ``override`` is false.
        """
        if self._per_step is not None and not override:
            raise ZeroEngineError(
                f"set_gradient_accumulation_boundary(): gradient_accumulation_steps is {self._per_step}, and the "
                f"engine counts. Write {MANUAL_MODE} in the configuration to set boundaries yourself."
            )
        self.boundary = None if boundary is None else bool(boundary)

    def set_micro_steps_per_step(self, steps: int) -> None:
        """Count to another number of micro-steps. See the method of ``Engine``.

        Raises:
            ZeroEngineError: A step is in progress, or micro-steps are not counted.
        """
        if self._per_step is None or self.has_gradients:
            when = f"with {MANUAL_MODE}" if self._per_step is None else "within a step, whose gradients are counted"
            raise ZeroEngineError(f"set_gradient_accumulation_steps() {when}: call it between steps that are counted")
        self._per_step = steps

    def check_boundary(self, call: str) -> None:
        """Check that the step in progress ends here, on behalf of ``call``.

        Raises:
            ZeroEngineError: There are no gradients, or the step in progress does not end here.
        """
        self.check_complete()
        if not self.has_new_gradients:
            raise ZeroEngineError(f"{call} without backward(): call it between the last backward of a step and step()")
        if not self.is_boundary():
            raise ZeroEngineError(
                f"{call} before the last backward of a step: further gradients are to come. Call it where "
                "engine.is_gradient_accumulation_boundary() is true."
            )

    # -- the end of a step ------------------------------------------------------------------------

    def engine_step_updates(self) -> bool:
        """Return whether `engine.step()` updates now, rather than ending a micro-step.

        Raises:
            ZeroEngineError: There was no backward, or `optimizer.step()` has ended this step.
        """
        self.check_complete()
        if not self.has_new_gradients:
            # If the other call has just used the gradients, the error names that call and not a missing backward.
            self._check_other_call(ENGINE_STEP, OPTIMIZER_STEP)
            check_trains(self._reducer, "step()")
            raise ZeroEngineError("step() without backward(): call engine.backward(loss) (or loss.backward()) first")
        return self._next_engine_step_updates

    def check_optimizer_step(self) -> None:
        """Check that `optimizer.step()` may end the step.

        Raises:
            ZeroEngineError: It is too early for an update, or `engine.step()` ends steps in this loop.
        """
        self.check_complete()
        if not self.backwards:
            self._check_other_call(OPTIMIZER_STEP, ENGINE_STEP)
            check_trains(self._reducer, "optimizer.step()")
            raise ZeroEngineError(
                "optimizer.step() without backward(): call engine.backward(loss) (or loss.backward()) first"
            )
        if self.ended_micro_steps:
            raise ZeroEngineError(
                f"optimizer.step() in a step of which engine.step() has ended "
                f"{counted(self.ended_micro_steps, 'micro-step')}. Keep one of the two calls: engine.step() after each "
                "backward, or optimizer.step() once a step."
            )
        if self._per_step is None:
            if self.boundary is False:
                raise ZeroEngineError(
                    "optimizer.step() after engine.set_gradient_accumulation_boundary(False): set it to True before "
                    "the last backward of a step"
                )
        elif self.backwards < self._per_step:
            raise ZeroEngineError(
                f"optimizer.step() after {self.backwards} of {self._per_step} backwards: gradient_accumulation_steps "
                f"is {self._per_step}. Call it once, after the last of them; or call engine.step() after each backward "
                f"instead; or write {MANUAL_MODE} in the configuration, and a step has as many backwards as you "
                "choose."
            )

    def _check_other_call(self, call: str, other: str) -> None:
        if self.last_update_by == other:
            raise ZeroEngineError(
                f"{call} after {other}, with no backward in between: {other} has already ended the step. Keep one of "
                "the two calls in the loop."
            )

    def end_micro_step(self) -> None:
        """Count a call of `engine.step()` that does not update."""
        self.micro_steps += 1
        self.ended_micro_steps += 1
        self._new_backwards = self._passes = self._local_passes = 0

    def end_step(self, call: str) -> None:
        """Count a call of `engine.step()` or `optimizer.step()` that updates."""
        # optimizer.step() is called once for all micro-steps of a step.
        self.micro_steps += 1 if call == ENGINE_STEP or self._per_step is None else self._per_step
        self.last_update_by = call
        self._start_step()
