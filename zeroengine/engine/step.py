"""The end of a step: clipping, the update, the LR schedule, and the counters.

[Note: Asynchronous steps]
With ``AsyncAdam`` (Adam on a GPU, nothing offloaded) ``Engine.step`` issues a step and returns before its result is
known: see "A step without waiting" in ``optim/backends/async_adam.py``. The host awaits the result when the user asks
for it (by ``global_steps`` and other counters, or the truth value of the ``StepResult``), when the next backward
begins, before checkpoints, and when the engine ends. At these times the device still has to run the update, and when
the next backward begins also the forward, so it does not run out of work.

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
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroengine.comm.interfaces import Transport
from zeroengine.config import Config
from zeroengine.engine.progress import ProgressPrinter
from zeroengine.errors import DivergenceError, ZeroEngineError
from zeroengine.monitor.record import EventKind
from zeroengine.monitor.timer import Timer
from zeroengine.optim.caller_optimizer import has_own_step_hooks
from zeroengine.optim.loss_scaler import LossScaler
from zeroengine.optim.lr_schedules import ScheduleGuard
from zeroengine.optim.reversible_schedule import step_reversibly
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.optim.step_result import StepResult, StepSettings
from zeroengine.partition.replicas import ReplicaLayout
from zeroengine.runtime.backward import Backward
from zeroengine.runtime.backward_listener import BackwardListener
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.reducer import Reducer
from zeroengine.utils.launcher_reports import report_step

log = logging.getLogger("zeroengine")


@dataclass(frozen=True)
class IssuedStep:
    """A step that has been taken, whose result may not be known yet.

    Attributes:
        number: The number of steps so far, updates and skipped ones.
        rates: The learning rate of each param group, a number or a tensor.
        loss_scale: The factor of the loss.
        result: Knows the norm, perhaps after a wait.
        skips: Whether a step whose norm is not finite is skipped.
    """

    number: int
    rates: Sequence[Any]
    loss_scale: float
    result: StepResult
    skips: bool


class StepRunner(BackwardListener):
    """Takes steps from reduced gradients, and counts the updates and the skipped steps.

    Args:
        config: The resolved configuration.
        optimizer: Updates this rank's shards.
        base_optimizer: The optimizer that was passed to ``initialize``, which torch's schedules may be bound to.
        schedule: The LR schedule, or None.
        scaler: The loss scale, which each step updates.
        reducer: Owns the gradients.
        gatherer: Publishes the updated parameters.
        transport: Knows whether the ranks of the replica have run the same collectives.
        replicas: Which ranks are in which replica.
        backward: Reports when the next backward begins.
        timer: Times the update.
        report_event: Called with the kind, the step and the text of an event.
        progress: Prints a line from time to time, if there is one.

    Attributes:
        issued_step: The last step, or None before the first.
        num_updates: Number of updates. Like the next two, it is up to date after ``await_result``.
        num_skipped: Number of steps that were skipped because the gradient was not finite.
        grad_norm: Norm of the last step's mean gradient before clipping, or None before the first step.
        gradient_clipping: The largest norm of the gradient; 0 for no clipping.
        base_optimizer: The optimizer that was passed to ``initialize``.
    """

    def __init__(
        self,
        config: Config,
        optimizer: ShardedOptimizer,
        base_optimizer: torch.optim.Optimizer,
        schedule: Any,
        scaler: LossScaler,
        reducer: Reducer,
        gatherer: Gatherer,
        transport: Transport,
        replicas: ReplicaLayout,
        backward: Backward,
        timer: Timer,
        report_event: Callable[[EventKind, int, str], None],
        progress: ProgressPrinter | None,
    ) -> None:
        self._progress = progress
        self.issued_step: IssuedStep | None = None
        self._timer, self._report_event = timer, report_event
        self.num_updates = self.num_skipped = 0
        self.grad_norm: float | None = None
        self.gradient_clipping = config.gradient_clipping
        # The limit that clip_grad_norm_ set for the step in progress.
        self._clip_once: float | None = None
        self._guard = ScheduleGuard(schedule)
        self._warned_of_hooks = False
        self._config, self._optimizer, self.base_optimizer = config, optimizer, base_optimizer
        self._scaler, self._reducer, self._gatherer, self._transport = scaler, reducer, gatherer, transport
        self._replicas = replicas
        # The result of the step that is not counted yet, and the function that reverts the schedule, if it was stepped.
        self._issued: tuple[StepResult, Callable[[], None] | None] | None = None
        # An overflow that has not been reported yet: the step's number, and whether the step was skipped.
        self._overflow: tuple[int, bool] | None = None
        backward.subscribe(self)

    def check_backward(self, wants_gradients: bool) -> None:
        """Report on the previous step. Refuse a backward after ``clip``, whose norm would lack its gradients."""
        # Every rank comes here, and the gradients of the previous step are still unchanged.
        self.await_and_report()
        # A backward of frozen parameters adds nothing to the gradient, so clipping before it is no mistake.
        if wants_gradients and self._clip_once is not None:
            raise ZeroEngineError(
                "a backward after engine.clip_grad_norm_() and before step(): clip after the last backward of a step"
            )

    @property
    def has_clipped(self) -> bool:
        """Whether ``clip`` was called in the step in progress."""
        return self._clip_once is not None

    def check_not_clipped(self, call: str) -> None:
        """Check that ``clip`` was not called in the step in progress.

        Raises:
            ZeroEngineError: It was, and ``call`` replaces gradients, to which its limit would apply as well.
        """
        if self.has_clipped:
            raise ZeroEngineError(
                f"{call} after engine.clip_grad_norm_() and before step(): the limit would also apply to the new "
                "gradient. Replace gradients before clipping; to add noise to a clipped gradient, scale "
                "zeroengine.full_gradient(param) yourself and leave clip_grad_norm_() out."
            )

    @property
    def schedule(self) -> Any:
        """The LR schedule that each update steps, or None."""
        return self._guard.schedule

    def set_schedule(self, schedule: Any) -> None:
        """Step ``schedule`` from now on, and leave the previous one to the caller."""
        # The result of the last step may still revert the previous schedule.
        self.await_result()
        self._guard.release()
        self._guard = ScheduleGuard(schedule)

    def close(self) -> None:
        """Leave the schedule to the caller, because no step will follow."""
        self._guard.release()
        # A schedule that the configuration made drives the engine's optimizer, which would keep all states in memory.
        if getattr(self.schedule, "optimizer", None) is self._optimizer:
            self.schedule.optimizer = self.base_optimizer

    def warn_of_unused_hooks(self) -> None:
        """Warn once that ``engine.step()`` does not call the step hooks of the optimizer that was passed in."""
        # Hooks may be registered after initialize(), so every step checks until the first warning.
        if not self._warned_of_hooks and has_own_step_hooks(self.base_optimizer):
            self._warned_of_hooks = True
            if self._replicas.rank == 0:
                log.warning(
                    "the optimizer passed to initialize() has step hooks, which engine.step() does not call: call "
                    "optimizer.step() in its place, which does"
                )

    # -- clipping ---------------------------------------------------------------------------------

    @staticmethod
    def checked_norm(value: Any, name: str, *, zero: bool) -> float:
        """Return ``value`` as a float.

        Raises:
            ZeroEngineError: It is not a number, or is below 0, or is 0 although ``zero`` is false.
        """
        # A bool is an int in Python, but ``True`` is hardly meant as a norm of 1.
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not (value >= 0 if zero else value > 0):
            raise ZeroEngineError(
                f"{name} is a number {'of at least' if zero else 'above'} 0, the largest norm; found {value!r}"
            )
        return float(value)

    def set_gradient_clipping(self, max_norm: float) -> None:
        """Clip the following steps to ``max_norm``; 0 clips nothing."""
        max_norm = self.checked_norm(max_norm, "gradient_clipping", zero=True)
        self.gradient_clipping = 0.0 if math.isinf(max_norm) else max_norm

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the step in progress, whose gradients are reduced, to ``max_norm``. Return the norm before clipping.

        Returns:
            0-d float64 on the device that the gradients are on.
        """
        self.await_result()
        norm = self._optimizer.backend.norm(self._reducer.divisor(), self._label())
        # The gradient is scaled only in the update, so a second call keeps the smaller limit.
        self._clip_once = min(max_norm, self._clip_once or math.inf)
        return norm

    def drop_gradients(self) -> None:
        """Undo ``clip``, because its limit must not apply to the gradients that follow."""
        self._clip_once = None

    def run_step(self) -> bool | StepResult:
        """Take a step, whose gradients are reduced.

        Returns:
            Whether parameters were updated. If the step is asynchronous, an object whose truth value awaits the result.

        Raises:
            ZeroEngineError: The gradient overflows at the smallest loss scale.
            DivergenceError: The ranks wrote different values into the parameters.
        """
        # The limit of ``clip`` applies to one step, even if that is skipped.
        limits, self._clip_once = (self.gradient_clipping, self._clip_once or 0.0), None
        limit = min((limit for limit in limits if 0 < limit < math.inf), default=0.0)
        settings = StepSettings(self._reducer.divisor(), limit, self._skips, self._label(limit))
        # The schedule and the scaler change these values once the step has ended, a tensor in place.
        rates, loss_scale = [group["lr"] for group in self._optimizer.param_groups], self._scaler.scale
        rates = copy.deepcopy(rates) if self._timer.enabled else rates
        try:
            with self._timer.span("update"):
                result = self._optimizer.backend.step(settings)
        except DivergenceError:
            # The gradients of this step count as used, so the next backward starts a new step.
            self._reducer.end_step()
            raise
        self._gatherer.end_update()
        if self._progress is not None:
            self._progress.end_step()
        number = self.num_updates + self.num_skipped + 1
        self.issued_step = IssuedStep(number, rates, loss_scale, result, self._skips)
        schedule = self.schedule
        reversible = schedule is None or all(hasattr(schedule, name) for name in ("state_dict", "load_state_dict"))
        # With a loss scale the next backward needs the result, and so does a schedule that cannot be reverted.
        is_async = self._optimizer.backend.is_async and not self._config.scales_loss and reversible
        revert_schedule = None
        if is_async:
            # The step is expected to update, so the schedule is stepped before the result is known.
            revert_schedule = step_reversibly(self._step_schedule, schedule, self._optimizer.param_groups)
            result.on_query = self._on_query()
        self._issued = (result, revert_schedule)
        self._reducer.end_step()
        if is_async:
            return result
        self._await_result(is_collective=True)
        return bool(result)

    def _on_query(self) -> Callable[[StepResult], None]:
        """Return a function that counts a step when the user asks for its result."""
        # The user may keep the result for longer than the engine, so the result must not keep the engine alive.
        runner_ref = weakref.ref(self)

        def on_query(result: StepResult) -> None:
            runner = runner_ref()
            # A later step may have been issued since. Asking about an old result must not wait for the new step.
            if runner is not None and runner._issued is not None and runner._issued[0] is result:
                runner.await_result()

        return on_query

    def await_result(self) -> None:
        """Wait for the result of the last step, if it is not known yet, and count the step. Not a collective."""
        self._await_result(is_collective=False)

    def _await_result(self, is_collective: bool) -> None:
        """Count the last step, as ``await_result`` does. If every rank comes here, report an overflow at once."""
        if self._issued is None:
            return
        # If the ranks ran different collectives, the result is meaningless, so that is reported first.
        self._transport.check_order()
        # The record is cleared before anything can raise or ask again, so that a step is counted once.
        (result, revert_schedule), self._issued = self._issued, None
        self._optimizer.backend.await_step_counts()
        self.grad_norm = result.grad_norm
        updates, finite = bool(result), math.isfinite(result.grad_norm)
        if not updates and revert_schedule is not None:
            revert_schedule()
        if not finite and is_collective:
            self._report(self.num_updates + 1, skipped=not updates)
        elif not finite:
            # The other ranks may not come here, so await_and_report runs the collective search for the name.
            self._overflow = (self.num_updates + 1, not updates)
        self._count(updates, finite, scheduled=revert_schedule is not None)

    def await_and_report(self) -> None:
        """Wait for the result of the last step, and report an overflow with the parameter's name. A collective.

        Call it on every rank, while the step's gradients are still unchanged.
        """
        self.await_result()
        # The record is cleared first, because the report may raise, and must not be repeated.
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            self._report(*overflow)

    def final_report(self) -> None:
        """Wait for the result of the last step, and report an overflow without a name. Not a collective."""
        self.await_result()
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            step, skipped = overflow
            self._warn(step, f"step {step} {'skipped' if skipped else 'updates'}: a gradient is not finite", skipped)

    @property
    def _skips(self) -> bool:
        """Whether a step with a gradient that is not finite is skipped."""
        return self._config.scales_loss or self._config.check_grad_overflow

    def _label(self, limit: float | None = None) -> str:
        """Return the label of the norm's collective. It names the settings that all ranks must share.

        Args:
            limit: The largest norm, if this is the norm of a step.
        """
        label = f"norm at loss scale {self._scaler.scale:g}" if self._config.scales_loss else "norm"
        # Ranks compare the labels of their collectives, so different limits raise an error. initialize() has compared
        # the configured limit.
        changed = limit is not None and limit != self._config.gradient_clipping
        return f"{label} to clip to {limit:g}" if changed else label

    def _count(self, updates: bool, finite: bool, *, scheduled: bool = False) -> None:
        """Count a step. If it updates, step the schedule, unless the step was ``scheduled`` already."""
        if updates:
            self.num_updates += 1
            # The first update tells zero-launch that this round has reached training. Later calls do nothing.
            report_step()
            if not scheduled:
                self._step_schedule()
            if self._progress is not None:
                rates = [group["lr"] for group in self._optimizer.param_groups]
                self._progress.count_update(self.num_updates, rates, self.grad_norm)
        else:
            self.num_skipped += 1
        scale = self._scaler.scale
        self._scaler.update(overflow=not finite)
        # Kept errors of quantized gradients are multiples of the loss scale, and those of a skipped step may be huge.
        if not updates or self._scaler.scale != scale:
            self._reducer.reduces.forget_errors()

    def _report(self, step: int, skipped: bool) -> None:
        """Log which gradient was not finite, or raise if the loss scale is the smallest. A collective."""
        name = self._optimizer.reduction.first_not_finite() or "none alone: their sum of squares"
        what = f"the gradient of {name} is not finite"
        # The loss scale is the same on every rank, so either all ranks raise or none does.
        if self._config.scales_loss and self._scaler.exhausted:
            self._reducer.end_step()
            raise ZeroEngineError(
                f"step {step}: {what}, at the smallest loss scale, {self._scaler.scale:g} "
                "(fp16.min_loss_scale). The model diverges or computes values beyond fp16's range: lower the learning "
                "rate, look at the data of this step, or use bf16."
            )
        scale = f" (loss scale {self._scaler.scale:g})" if self._config.scales_loss else ""
        verb = "skipped" if skipped else "updates with values that are not finite (check_grad_overflow is false)"
        self._warn(step, f"step {step} {verb}: {what}{scale}", skipped)

    def _warn(self, step: int, text: str, skipped: bool) -> None:
        number = self.issued_step.number if self.issued_step else step
        self._report_event("skip" if skipped else "warning", number, text)
        # Each replica has overflows of its own, and its first rank reports them.
        if self._replicas.local_rank == 0:
            several = self._replicas.num_replicas > 1
            log.warning("%s%s", f"replica {self._replicas.replica}: " if several else "", text)

    def _step_schedule(self) -> None:
        # torch's schedulers warn unless they see that their optimizer has stepped.
        for optimizer in (self._optimizer, self.base_optimizer):
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self._guard.step()
