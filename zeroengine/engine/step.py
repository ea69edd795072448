"""The end of a step: clipping, the update, the schedule, and what is counted of it.

What is known late on a GPU is in the note in ``late.py``.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from zeroengine.comm.interfaces import Transport
from zeroengine.config import Config
from zeroengine.engine.late import can_be_taken_back, reversibly
from zeroengine.errors import DivergenceError, ZeroEngineError
from zeroengine.optim.caller_optimizer import has_own_step_hooks
from zeroengine.optim.loss_scaler import LossScaler
from zeroengine.optim.lr_schedules import ScheduleGuard
from zeroengine.optim.sharded_optimizer import GradientSummary, ShardedOptimizer
from zeroengine.optim.step_result import StepResult
from zeroengine.runtime.reducer import Reducer
from zeroengine.utils.launcher_environment import report_step

log = logging.getLogger("zeroengine")


class Steps:
    """Takes steps from reduced gradients, and knows what became of them, once ``settle`` has returned.

    Args:
        rule: the optimizer that was handed in, which torch's schedules may be bound to.
        published: called when an update is issued.

    Attributes:
        taken, skipped: updates taken, and left out because the gradient was not finite.
        gradient_clipping: the largest norm of the gradient; 0 for none.
        norm: of the last step's mean gradient before clipping, or None before the first.
    """

    def __init__(
        self,
        config: Config,
        optimizer: ShardedOptimizer,
        rule: torch.optim.Optimizer,
        schedule: Any,
        scaler: LossScaler,
        reducer: Reducer,
        transport: Transport,
        published: Callable[[], None],
    ) -> None:
        self.taken = self.skipped = 0
        self.norm: float | None = None
        self.gradient_clipping = config.gradient_clipping
        self._clip_once: float | None = None  # for this step alone, by clip_grad_norm_
        self._guard = ScheduleGuard(schedule)
        self._checked_hooks = False
        self._config, self._optimizer, self._rule = config, optimizer, rule
        self._scaler, self._reducer, self._transport, self._published = scaler, reducer, transport, published
        self._issued: tuple[StepResult, Callable[[], None] | None] | None = None  # a step; what takes the schedule back
        self._overflow: tuple[int, bool] | None = None  # to report: the step's number, whether it was skipped

    def divisor(self) -> float:
        """What the summed gradient is divided by for the mean over ranks and micro-steps."""
        copies = self._transport.world_size * self._config.micro_steps_in_mean
        return copies * self._scaler.scale / self._reducer.predivide

    @property
    def schedule(self) -> Any:
        """What a step steps, or None."""
        return self._guard.schedule

    def set_schedule(self, schedule: Any) -> None:
        """Step ``schedule`` from now on, and leave the one before to the caller."""
        self.settle()
        self._guard.release()
        self._guard = ScheduleGuard(schedule)

    def close(self) -> None:
        """Leave the schedule to the caller: no step will follow."""
        self._guard.release()

    def warn_of_unused_hooks(self) -> None:
        """Say once that the step hooks of the optimizer that was passed in are not called by ``engine.step()``."""
        if not self._checked_hooks and has_own_step_hooks(self._rule):
            self._checked_hooks = True
            if self._transport.rank == 0:
                log.warning(
                    "the optimizer passed to initialize() has step hooks, which engine.step() does not call: call "
                    "optimizer.step() in its place, which does"
                )

    # -- clipping ---------------------------------------------------------------------------------

    @staticmethod
    def checked_norm(value: Any, name: str, *, zero: bool) -> float:
        """``value`` as a float.

        Raises:
            ZeroEngineError: it is no number, or below 0, or 0 where ``zero`` is false.
        """
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not (value >= 0 if zero else value > 0):
            raise ZeroEngineError(
                f"{name} is a number {'of at least' if zero else 'above'} 0, the largest norm; found {value!r}"
            )
        return float(value)

    def set_gradient_clipping(self, max_norm: float) -> None:
        """Clip the following steps to ``max_norm``; 0: not at all."""
        max_norm = self.checked_norm(max_norm, "gradient_clipping", zero=True)
        self.gradient_clipping = 0.0 if math.isinf(max_norm) else max_norm

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the step in progress to ``max_norm``, and return the norm that it finds. Its gradients are reduced.

        Returns:
            0-d float64 on the device that the gradients are on.
        """
        self.settle()
        divisor = self.divisor()
        if self._optimizer.on_device:
            self._reduce_late_here()
            norm = self._optimizer.norm(divisor, self._label())
        else:
            summary = self._summarise(self._label())
            norm = torch.tensor(summary.norm / divisor, dtype=torch.float64, device=self._optimizer.computes_on)
        self._clip_once = min(max_norm, self._clip_once or math.inf)
        return norm

    def forget_clipping(self) -> None:
        """Undo ``clip``: the gradients of this step have been dropped."""
        self._clip_once = None

    def check_not_clipped(self) -> None:
        """
        Raises:
            ZeroEngineError: a backward follows ``clip`` in one step.
        """
        if self._clip_once is not None:
            raise ZeroEngineError(
                "a backward after engine.clip_grad_norm_() and before step(): clip after the last backward of a step"
            )

    def _take_limit(self) -> float:
        """The largest norm for the step that is taken now; 0 for none."""
        limits = [limit for limit in (self.gradient_clipping, self._clip_once or 0.0) if 0 < limit < math.inf]
        self._clip_once = None
        return min(limits, default=0.0)

    def take(self) -> bool | StepResult:
        """A step, whose gradients are reduced. Whether parameters were updated, or what will say so.

        Raises:
            ZeroEngineError: the gradient overflows at the smallest loss scale.
            DivergenceError: the ranks wrote different values into the parameters.
        """
        limit = self._take_limit()
        if self._optimizer.on_device:
            self._reduce_late_here()
            return self._issue(limit)
        try:
            norm, used, _ = self._summarise(self._label(limit))
        except DivergenceError:
            self._reducer.end_step()
            raise
        divisor = self.divisor()
        self.norm = norm / divisor
        finite = math.isfinite(norm)
        updates = finite or not self._skips
        if not finite:
            self._report(self.taken + 1, skipped=not updates)
        if updates:
            self._optimizer.update(self._clip_factor(self.norm, limit) / divisor, used)
            self._published()
        self._reducer.end_step()
        self._count(updates, finite)
        return updates

    def _summarise(self, label: str) -> GradientSummary:
        """Return the summary of the gradients, once those that wait on some rank have been reduced."""
        summary = self._optimizer.summarise(label, late=self._reducer.has_late_gradients)
        if summary.any_late:
            self._reducer.reduce_late_gradients()
            summary = self._optimizer.summarise(label, late=False)
        return summary

    def _reduce_late_here(self) -> None:
        """Reduce what waits on this rank, taking it that all ranks do: asking them would make the host wait."""
        if self._reducer.has_late_gradients:
            self._reducer.reduce_late_gradients()

    def _issue(self, limit: float) -> StepResult:
        """An update whose result is not known yet."""
        config, schedule = self._config, self.schedule
        result = self._optimizer.issue(self.divisor(), limit, self._skips, self._label(limit))
        self._published()
        late = not config.scales_loss and can_be_taken_back(schedule)
        groups = self._optimizer.param_groups
        me = weakref.ref(self)

        def on_query(result: StepResult) -> None:
            steps = me()
            if steps is not None and steps._issued is not None and steps._issued[0] is result:
                steps.settle()

        result.on_query = on_query
        self._issued = (result, reversibly(self._step_schedule, schedule, groups) if late else None)
        self._reducer.end_step()
        if not late:
            self.settle()
        return result

    def settle(self) -> None:
        """Takes in the result of the last step, where it was not known yet. No other rank takes part."""
        if self._issued is None:
            return
        self._transport.check_order()
        (result, take_back), self._issued = self._issued, None
        self._optimizer.settle()
        self.norm = result.grad_norm
        updates, finite = bool(result), math.isfinite(result.grad_norm)
        if not updates and take_back is not None:
            take_back()
        if not finite and self._config.scales_loss:  # this is the step itself, on every rank
            self._report(self.taken + 1, skipped=True)
        elif not finite:
            self._overflow = (self.taken + 1, not updates)
        self._count(updates, finite, scheduled=take_back is not None)

    def conclude(self) -> None:
        """``settle``, and the report on what it found. Every rank comes by, with the step's gradients as they were."""
        self.settle()
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            self._report(*overflow)

    def end(self) -> None:
        """``settle``, and a word on an overflow that it found; no other rank takes part, so without a name."""
        self.settle()
        overflow, self._overflow = self._overflow, None
        if overflow is not None and self._transport.rank == 0:
            log.warning("step %d %s: a gradient is not finite", overflow[0], "skipped" if overflow[1] else "updates")

    @property
    def _skips(self) -> bool:
        """Whether a gradient that is not finite updates nothing."""
        return self._config.scales_loss or self._config.check_grad_overflow

    def _label(self, limit: float | None = None) -> str:
        """Ranks that differ in the loss scale or the limit are refused, as if they ran different units.

        Args:
            limit: the largest norm, where the step is taken.
        """
        label = f"norm at loss scale {self._scaler.scale:g}" if self._config.scales_loss else "norm"
        changed = limit is not None and limit != self._config.gradient_clipping
        return f"{label} to clip to {limit:g}" if changed else label

    @staticmethod
    def _clip_factor(norm: float, limit: float) -> float:
        """As ``torch.nn.utils.clip_grad_norm_``, also where the norm is not finite."""
        factor = limit / (norm + 1e-6) if limit > 0 else 1.0
        return 1.0 if factor > 1 else factor

    def _count(self, updates: bool, finite: bool, *, scheduled: bool = False) -> None:
        """Counts a step, and steps the schedule unless it has been ``scheduled``."""
        if updates:
            self.taken += 1
            report_step()
            if not scheduled:
                self._step_schedule()
            self._print_progress()
        else:
            self.skipped += 1
        self._scaler.update(overflow=not finite)

    def _report(self, step: int, skipped: bool) -> None:
        """Says which gradient was not finite; on every rank raises where no smaller loss scale is left."""
        name = self._optimizer.first_not_finite() or "none alone: their sum of squares"
        what = f"the gradient of {name} is not finite"
        if self._config.scales_loss and self._scaler.exhausted:
            self._reducer.end_step()
            raise ZeroEngineError(
                f"step {step}: {what}, at the smallest loss scale, {self._scaler.scale:g} "
                "(fp16.min_loss_scale). The model diverges or computes values beyond fp16's range: lower the learning "
                "rate, look at the data of this step, or use bf16."
            )
        if self._transport.rank == 0:
            scale = f" (loss scale {self._scaler.scale:g})" if self._config.scales_loss else ""
            verb = "skipped" if skipped else "updates with values that are not finite (check_grad_overflow is false)"
            log.warning("step %d %s: %s%s", step, verb, what, scale)

    def _step_schedule(self) -> None:
        # torch's schedulers warn unless they see that their optimizer has stepped.
        for optimizer in (self._optimizer, self._rule):
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self._guard.step()

    def _print_progress(self) -> None:
        every = self._config.steps_per_print
        if every and self._transport.rank == 0 and self.taken % every == 0:
            rates = ", ".join(f"{group['lr']:.3g}" for group in self._optimizer.param_groups)
            print(f"step {self.taken}: lr {rates}, grad norm {self.norm:.4g}", flush=True)
