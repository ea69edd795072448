"""The end of a step: clipping, the update, the LR schedule, and the counters.

[Note: Asynchronous steps]
With ``AsyncUpdate`` (a fused rule on a GPU, nothing offloaded) ``Engine.step`` issues a step and returns before its
result is known: see "A step without waiting" in ``optim/backends/async_update.py``. The host awaits the result when the
user asks for it (by ``global_steps`` and other counters, or the truth value of the ``StepResult``), when the next
backward begins, before checkpoints, and when the engine ends. At these times the device still has to run the update,
and when the next backward begins also the forward, so it does not run out of work.

- A rank awaits the result without the others, because the user may ask on one rank. Finding the name of the parameter
  whose gradient was not finite is a collective. It runs when the next backward begins, because that happens on every
  rank, and before gradients are overwritten.
- The LR schedule is stepped at once. If the step turns out to have been skipped, the schedule and the hyperparameters
  are reverted, except for hyperparameters that the user has written since.
- In fp16 a step is not asynchronous, because the loss scale of the next backward depends on the result, and because an
  overflow at the smallest scale is an error of that very step. Nor is it with a schedule without ``state_dict``, which
  cannot be reverted.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from zeroengine.config import Config
from zeroengine.engine.clipping import GradientClipping
from zeroengine.engine.parts import Passes, States
from zeroengine.engine.ranks import Ranks
from zeroengine.engine.reports import Reports
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.reversible_schedule import step_reversibly
from zeroengine.optim.step_result import IssuedStep, StepResult, StepSettings
from zeroengine.runtime.autograd_hooks import WeakMethod
from zeroengine.utils.launcher import REPORTED_STEPS, report_step
from zeroengine.utils.tensors import HostCopy

log = logging.getLogger("zeroengine")


class StepCounts(NamedTuple):
    """What a ``StepRunner`` has counted: its attributes of these names."""

    num_updates: int
    num_skipped: int
    num_skipped_in_a_row: int
    grad_norm: float | None
    issued_step: IssuedStep | None


class StepRunner:
    """Takes steps from reduced gradients, and counts the updates and the skipped steps.

    Args:
        config: The resolved configuration.
        ranks: The ranks.
        passes: Where the gradients come from and the updated parameters go.
        states: What a step updates.
        clipping: The largest norm of the gradient.
        reports: What reports on the steps.

    Attributes:
        issued_step: The last step, or None before the first, as after a load.
        num_updates: Number of updates. Like the next two, it is up to date after ``await_result``.
        num_skipped: Number of steps that were skipped: the gradient was not finite, the losses had no weight, or the
            step was an outlier.
        grad_norm: Norm of the last step's mean gradient before clipping; None before the first step and after a load.
        num_skipped_in_a_row: Number of the latest steps that were skipped, all of them as outliers or, except in fp16,
            because the gradient was not finite.
    """

    def __init__(
        self, config: Config, ranks: Ranks, passes: Passes, states: States, clipping: GradientClipping, reports: Reports
    ) -> None:
        self._config, self._ranks, self._passes, self._states = config, ranks, passes, states
        self._clipping, self._reports = clipping, reports
        # Whether a step with a gradient that is not finite is skipped.
        self._skips = config.scales_loss or config.check_grad_overflow
        self.issued_step: IssuedStep | None = None
        self.num_updates = self.num_skipped = self.num_skipped_in_a_row = 0
        self.grad_norm: float | None = None
        # The result of the step that is not counted yet, and the function that reverts the schedule, if it was stepped.
        self._uncounted: tuple[StepResult, Callable[[], None] | None] | None = None
        # An overflow that has not been reported yet: the step's number, and whether the step was skipped.
        self._overflow: tuple[int, bool] | None = None
        # Whatever fails from here on until a step was taken fails before the first step.
        REPORTED_STEPS.setdefault("step", 0)

    def counts(self) -> StepCounts:
        """Return what was counted so far. The result of the last step is known."""
        return StepCounts(
            self.num_updates, self.num_skipped, self.num_skipped_in_a_row, self.grad_norm, self.issued_step
        )

    def restore_counts(self, counts: StepCounts) -> None:
        """Go on counting there."""
        self.num_updates, self.num_skipped, self.num_skipped_in_a_row, self.grad_norm, self.issued_step = counts

    @property
    def next_number(self) -> int:
        """The number of the step in progress, or of the next one, without waiting for the last one."""
        if self._uncounted is not None and self.issued_step is not None:
            return self.issued_step.number + 1
        return self.num_updates + self.num_skipped + 1

    def norm(self) -> torch.Tensor:
        """Return the norm of the mean gradient of the step in progress, whose gradients are reduced.

        Returns:
            0-d float64 on the device that the gradients are on.
        """
        self.await_result()
        optimizer, divisor = self._states.optimizer, self._passes.reducer.divisor()
        return optimizer.reduction.norm(divisor, self._label(), waits=not optimizer.backend.is_async)

    def run_step(self) -> bool | StepResult:
        """Take a step, whose gradients are reduced.

        Returns:
            Whether parameters were updated. If the step is asynchronous, an object whose truth value awaits the result.

        Raises:
            ZeroEngineError: The gradient overflows at the smallest loss scale.
            DivergenceError: The ranks wrote different values into the parameters.
        """
        optimizer, reducer, scaler = self._states.optimizer, self._passes.reducer, self._passes.scaler
        limit = self._clipping.take_limit()
        try:
            # A step of assigned gradients alone had no backward that awaited the step before it.
            self.await_result()
            number = self.next_number
            is_weighted, outliers = reducer.losses.is_weighted, self._states.outliers
            if outliers is not None and outliers.judges_loss and reducer.losses.total is None:
                raise ZeroEngineError(
                    "skip_steps judges steps by their loss, which is not known where the loop calls loss.backward(): "
                    'call engine.backward(loss), or write "skip_steps": {"of": ["norm"]}'
                )
            settings = StepSettings(reducer.divisor(), limit, self._skips, self._label(limit), number, is_weighted)
            # The schedule and the scaler change these values once the step has ended, a tensor in place.
            rates, loss_scale = [group["lr"] for group in optimizer.param_groups], scaler.scale
            rates = copy.deepcopy(rates) if self._reports.timer.enabled else rates
            with self._reports.timer.span("update"):
                result = optimizer.backend.step(settings)
        except BaseException:
            # Such as one of the optimizer's own. The micro-steps are counted, so these gradients count as used, and
            # the next backward starts a new step.
            reducer.end_step()
            raise
        self._passes.gatherer.end_update()
        mean = reducer.losses.mean(reducer.micro_steps_in_mean)
        loss = None if mean is None else HostCopy(mean)
        self.issued_step = IssuedStep(number, rates, loss_scale, loss, result)
        schedule = self._states.lr_schedule
        # With a loss scale the next backward needs the result, and so does a schedule that cannot be reverted.
        is_async = optimizer.backend.is_async and not self._config.scales_loss and schedule.is_reversible
        revert_schedule = None
        if is_async:
            # The step is expected to update, so the schedule is stepped before the result is known.
            revert_schedule = step_reversibly(schedule.step, schedule.current, optimizer.param_groups)
            # The user may keep the result for longer than the engine, so the result must not keep the engine alive.
            result.on_query = WeakMethod(self, StepRunner.await_result)
        self._uncounted = (result, revert_schedule)
        reducer.end_step()
        if is_async:
            return result
        self.await_result(is_collective=True)
        return bool(result)

    def await_result(self, *, is_collective: bool = False) -> None:
        """Wait for the result of the last step, if it is not known yet, and count the step.

        Args:
            is_collective: Whether every rank comes here, so that an overflow is reported at once.
        """
        if self._uncounted is None:
            return
        # If the ranks ran different collectives, the result is meaningless, so that is reported first.
        self._ranks.transport.check_order()
        # The record is cleared before anything can raise or ask again, so that a step is counted once.
        (result, revert_schedule), self._uncounted = self._uncounted, None
        self._states.optimizer.backend.await_step_counts()
        self.grad_norm = result.grad_norm
        updates, finite = bool(result), math.isfinite(result.grad_norm)
        if not updates and revert_schedule is not None:
            revert_schedule()
        if result.is_outlier:
            section = self._config.skip_steps
            assert section is not None
            number, what = self.next_number, " or ".join(section.of)
            self._warn(
                number,
                f"step {number} skipped: its {what} is more than {section.sigma:g} standard deviations from the mean "
                f"of the latest {section.window} steps (norm {result.grad_norm:.4g}; skip_steps)",
                True,
            )
        if updates:
            self.num_skipped_in_a_row = 0
        elif result.is_outlier or not (finite or self._config.scales_loss):
            self.num_skipped_in_a_row += 1
        if not finite and is_collective:
            self._report(self.next_number, skipped=not updates)
        elif not finite:
            # The other ranks may not come here, so await_and_report runs the collective search for the name.
            self._overflow = (self.next_number, not updates)
        self._count(updates, finite, scheduled=revert_schedule is not None)

    def await_and_report(self) -> None:
        """Wait for the result of the last step, and report an overflow with the parameter's name. A collective.

        Call it on every rank, while the step's gradients are still unchanged.
        """
        if (overflow := self._take_overflow()) is not None:
            self._report(*overflow)

    def final_report(self) -> None:
        """Wait for the result of the last step, and report an overflow without a name. Not a collective."""
        if (overflow := self._take_overflow()) is not None:
            step, skipped = overflow
            self._warn(step, f"step {step} {'skipped' if skipped else 'updates'}: a gradient is not finite", skipped)

    def _take_overflow(self) -> tuple[int, bool] | None:
        self.await_result()
        # The record is cleared first, because a report may raise, and must not be repeated.
        overflow, self._overflow = self._overflow, None
        return overflow

    def _label(self, limit: float | None = None) -> str:
        """Return the label of the norm's collective. It names the settings that all ranks must share.

        Args:
            limit: The largest norm, if this is the norm of a step.
        """
        label = f"norm at loss scale {self._passes.scaler.scale:g}" if self._config.scales_loss else "norm"
        label += " of weighted losses" if self._passes.reducer.losses.is_weighted else ""
        # Ranks compare the labels of their collectives, so different limits raise an error. initialize() has compared
        # the configured limit.
        changed = limit is not None and limit != self._config.gradient_clipping
        return f"{label} to clip to {limit:g}" if changed else label

    def _count(self, updates: bool, finite: bool, *, scheduled: bool = False) -> None:
        """Count a step. If it updates, step the schedule, unless the step was ``scheduled`` already."""
        if updates:
            self.num_updates += 1
            if not scheduled:
                self._states.lr_schedule.step()
            if self._reports.progress is not None and self.issued_step is not None:
                rates = [group["lr"] for group in self._states.optimizer.param_groups]
                self._reports.progress.count_update(self.num_updates, rates, self.grad_norm, self.issued_step.loss)
        else:
            self.num_skipped += 1
        report_step(self.num_updates + self.num_skipped)
        scaler = self._passes.scaler
        scale = scaler.scale
        scaler.update(overflow=not finite)
        # Kept errors of quantized gradients are multiples of the loss scale, and those of a skipped step may be huge.
        if not updates or scaler.scale != scale:
            self._passes.reducer.launcher.forget_errors()

    def _report(self, step: int, skipped: bool) -> None:
        """Log which gradient was not finite, or raise if the loss scale is the smallest. A collective."""
        name = self._states.optimizer.reduction.first_not_finite() or "none alone: their sum of squares"
        what = f"the gradient of {name} is not finite"
        # The loss scale is the same on every rank, so either all ranks raise or none does.
        if self._config.scales_loss and self._passes.scaler.exhausted:
            self._passes.reducer.end_step()
            raise ZeroEngineError(
                f"step {step}: {what}, at the smallest loss scale, {self._passes.scaler.scale:g} "
                "(fp16.min_loss_scale). The model diverges or computes values beyond fp16's range: lower the learning "
                "rate, look at the data of this step, or use bf16."
            )
        scale = f" (loss scale {self._passes.scaler.scale:g})" if self._config.scales_loss else ""
        verb = "skipped" if skipped else "updates with values that are not finite (check_grad_overflow is false)"
        self._warn(step, f"step {step} {verb}: {what}{scale}", skipped)

    def _warn(self, step: int, text: str, skipped: bool) -> None:
        number = self.issued_step.number if self.issued_step else step
        self._reports.event("skip" if skipped else "warning", number, text)
        # With local steps each replica has overflows of its own, and its first rank reports them.
        replicas, are_apart = self._ranks.replica_layout, self._config.local_steps is not None
        if (replicas.local_rank if are_apart else self._ranks.group.rank) == 0:
            log.warning("%s%s", f"replica {replicas.replica}: " if are_apart else "", text)
