"""DeepSpeed's five learning-rate schedules as classes that a script makes and steps itself.

The formulas are those of ``zeroengine.optim.lr_schedules``. These classes add what scripts read of DeepSpeed's:
``last_batch_iteration`` (-1 before the first step), ``get_lr``, ``get_mom``, and ``step`` to a given iteration.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

log = logging.getLogger("zeroengine")

Rates = float | Sequence[float]


class ScheduleOfIterations:
    """Sets the learning rates of an optimizer's groups from the number of the last step.

    Args:
        optimizer: A torch optimizer, or a wrapper with the attribute ``optimizer``.
        last_batch_iteration: The number of the last step; -1 starts the schedule.

    Attributes:
        optimizer: The torch optimizer.
        last_batch_iteration: The number of the last step.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Any] = []

    def _begin(self) -> None:
        """Write the rates of the start into the groups, once the constructor has all parameters."""
        if self.last_batch_iteration == -1:
            self._write()

    def _write(self) -> None:
        self._last_lr = write_rates(self.optimizer.param_groups, self.get_lr())

    def get_lr(self) -> list[Any]:
        """Return the rate of each group at ``last_batch_iteration``."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """Return the rates that were written last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next step, or to ``last_batch_iteration``, and write its rates into the groups."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_state_dict`` needs."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Continue at a saved step. The next ``step`` writes its rates."""
        self.last_batch_iteration = sd["last_batch_iteration"]


class LRRangeTest(ScheduleOfIterations):
    """A growing rate, to find the largest that trains (arXiv 1506.01186)."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if lr_range_test_step_size <= 0:
            raise ValueError(f"lr_range_test_step_size is a number above 0; found {lr_range_test_step_size}")
        self.min_lr = rates_of_groups(self.optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._begin()

    def get_lr(self) -> list[Any]:
        """Return the rate of each group at ``last_batch_iteration``."""
        intervals = (self.last_batch_iteration + 1) / self.step_size
        intervals = float(math.floor(intervals)) if self.staircase else intervals
        return [low * (1 + self.step_rate * intervals) for low in self.min_lr]


class WarmupLR(ScheduleOfIterations):
    """Rise from ``warmup_min_lr`` to ``warmup_max_lr`` (None: the rate of each group), then stay there."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps = checked_warmup_steps(warmup_num_steps)
        self.warmup_type = checked_warmup_type(warmup_type)
        self.min_lrs = rates_of_groups(self.optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = rates_of_groups(self.optimizer, warmup_max_lr, "warmup_max_lr")
        self._begin()

    def get_lr(self) -> list[Any]:
        """Return the rate of each group at ``last_batch_iteration``."""
        if self.last_batch_iteration < 0:
            return self.min_lrs
        part = self._part()
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _part(self) -> float:
        """Return where between the two rates this step lies, from 0 to 1."""
        return warmup_part(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """Rise, then fall linearly to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        warn_of_short_run(total_num_steps, self.warmup_num_steps)

    def _part(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._part()
        total = self.total_num_steps
        return max(0.0, (total - self.last_batch_iteration) / max(1.0, total - self.warmup_num_steps))


class WarmupCosineLR(ScheduleOfIterations):
    """Rise to the rate of each group, then fall along a cosine to ``cos_min_ratio`` of it at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps = checked_warmup_steps(warmup_num_steps)
        self.warmup_type = checked_warmup_type(warmup_type)
        self.total_num_steps, self.cos_min_ratio = total_num_steps, cos_min_ratio
        self.warmup_min_ratio = warmup_min_ratio
        warn_of_short_run(total_num_steps, self.warmup_num_steps)
        self.org_lrs = rates_of_groups(self.optimizer, None, "lr")
        self._begin()

    def get_lr_ratio(self) -> float:
        """Return the factor of each group's own rate at ``last_batch_iteration``."""
        step, warm = self.last_batch_iteration, self.warmup_num_steps
        if step < 0:
            return 0.0
        if step < warm:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * warmup_part(step, warm, self.warmup_type)
        # DeepSpeed counts the first step after the warm-up as one step of the cosine.
        part = min(1.0, (step - warm + 1) / max(1, self.total_num_steps - warm))
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * part)) / 2

    def get_lr(self) -> list[Any]:
        """Return the rate of each group at ``last_batch_iteration``."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


class OneCycle(ScheduleOfIterations):
    """One cycle of the rate up and down, then decay; momentum moves the other way (arXiv 1803.09820)."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        first = float(cycle_first_step_size)
        second = first if cycle_second_step_size is None else float(cycle_second_step_size)
        if first <= 0 or second < 0:
            raise ValueError(
                f"cycle_first_step_size is above 0 and cycle_second_step_size at least 0; found {first:g}, {second:g}"
            )
        self.first_step_size, self.second_step_size, self.total_size = first, second, first + second
        self.step_ratio = first / self.total_size
        self.first_stair_count = cycle_first_stair_count
        stairs = cycle_second_stair_count
        self.second_stair_count = cycle_first_stair_count if stairs is None else stairs
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = rates_of_groups(self.optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = rates_of_groups(self.optimizer, cycle_max_lr, "cycle_max_lr")
        self._min_moms = rates_of_groups(self.optimizer, cycle_min_mom, "cycle_min_mom")
        self._max_moms = rates_of_groups(self.optimizer, cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            log.warning("OneCycle: %s has no betas, so no momentum is cycled", type(self.optimizer).__name__)
        self._begin()
        if last_batch_iteration == -1 and self.cycle_momentum:
            # DeepSpeed starts at the low momentum, and the first step goes to the high one.
            self._write_momenta(self._min_moms)

    def get_lr(self) -> list[Any]:
        """Return the rate of each group at ``last_batch_iteration``."""
        after = self._decay_intervals()
        if after is not None:
            return [low / (1 + self.decay_lr_rate * after) for low in self.min_lrs]
        part = self._part()
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """Return the betas of each group at ``last_batch_iteration``; None where momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        groups = self.optimizer.param_groups
        return [(mom, *group["betas"][1:]) for mom, group in zip(self._momenta(), groups, strict=True)]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next step, or to ``last_batch_iteration``, and write its rates and momenta into the groups."""
        super().step(last_batch_iteration)
        if self.cycle_momentum:
            self._write_momenta(self._momenta())

    def _write_momenta(self, momenta: list[float]) -> None:
        for mom, group in zip(momenta, self.optimizer.param_groups, strict=True):
            group["betas"] = (mom, *group["betas"][1:])

    def _momenta(self) -> list[float]:
        after = self._decay_intervals()
        if after is not None:
            # A momentum of 1 or more would diverge.
            return [min(0.999, high * (1 + self.decay_mom_rate * after)) for high in self._max_moms]
        part = self._part()
        return [high - (high - low) * part for low, high in zip(self._min_moms, self._max_moms, strict=True)]

    def _decay_intervals(self) -> float | None:
        """Return how many decay intervals lie behind the end of the cycle; None within the cycle."""
        if self.last_batch_iteration < self.total_size:
            return None
        steps = self.last_batch_iteration - self.total_size + 1
        return steps / self.decay_step_size if self.decay_step_size else 0.0

    def _part(self) -> float:
        """Return how high in the cycle this step lies, from 0 to 1."""
        step = (self.last_batch_iteration + 1) % self.total_size
        if step <= self.first_step_size:
            done, length, stairs = step, self.first_step_size, self.first_stair_count
        else:
            done, length, stairs = self.total_size - step, self.second_step_size, self.second_stair_count
        return math.floor(done * stairs / length) / stairs if stairs > 0 else done / length


SCHEDULES = {kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer that ``optimizer`` is or wraps.

    Raises:
        TypeError: It is neither.
    """
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise TypeError(f"a schedule takes a torch.optim.Optimizer, found {type(optimizer).__name__}")


def rates_of_groups(optimizer: torch.optim.Optimizer, rates: Rates | None, name: str) -> list[Any]:
    """Return the rate of each param group: one for all, those of a list, or with None what the groups have.

    Raises:
        ValueError: A list has another length than there are groups.
    """
    num_groups = len(optimizer.param_groups)
    if rates is None:
        own_rates = [group["lr"] for group in optimizer.param_groups]
        return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in own_rates]
    if not isinstance(rates, (list, tuple)):
        return [rates] * num_groups
    if len(rates) != num_groups:
        raise ValueError(f"{name} has {len(rates)} values, and the optimizer has {num_groups} param groups")
    return list(rates)


def write_rates(groups: Sequence[dict[str, Any]], rates: Sequence[Any]) -> list[Any]:
    """Write a rate into each group, a tensor in place, and return the groups' rates."""
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(float(rate))
        else:
            group["lr"] = rate
    return [group["lr"] for group in groups]


def checked_warmup_steps(steps: Any) -> int:
    """Return the number of steps of a warm-up, at least 2.

    Raises:
        ValueError: It is no integer above 0.
    """
    if not isinstance(steps, int) or steps <= 0:
        raise ValueError(f"warmup_num_steps is an integer above 0; found {steps!r}")
    return max(2, steps)


def checked_warmup_type(kind: str) -> str:
    """Return the shape of a warm-up; with a warning "log" for an unknown one, as in DeepSpeed."""
    if kind in ("log", "linear"):
        return kind
    log.warning('warmup_type is "log" or "linear"; found %r, and "log" is taken', kind)
    return "log"


def warmup_part(step: int, warm: int, kind: str) -> float:
    """Return how far a warm-up of ``warm`` steps has come, from 0 to 1."""
    if step >= warm:
        return 1.0
    return math.log(step + 1) / math.log(warm) if kind == "log" else step / warm


def warn_of_short_run(total: int, warm: int) -> None:
    """Warn where a schedule ends within its warm-up."""
    if total < warm:
        log.warning("total_num_steps (%d) is less than warmup_num_steps (%d)", total, warm)
