"""DeepSpeed's five learning-rate schedules as classes that a script makes and steps itself.

The formulas are those of ``zeroengine.optim.lr_schedules``. These classes add what scripts read of DeepSpeed's:
``last_batch_iteration`` (-1 before the first step), ``get_lr``, ``get_mom``, ``step`` to a given iteration, and the
parameters as attributes of DeepSpeed's names, such as ``max_lrs``, which may be written.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from zeroengine.optim.lr_schedules import RATES, one_cycle_momentum, params_of_groups, write_one_cycle_momentum

log = logging.getLogger("zeroengine")

Rates = float | Sequence[float]

# The attributes that keep arguments of the constructors, where DeepSpeed's have other names.
ATTRIBUTES = {
    "lr_range_test_min_lr": "min_lr",
    "lr_range_test_step_size": "step_size",
    "lr_range_test_step_rate": "step_rate",
    "lr_range_test_staircase": "staircase",
    "warmup_min_lr": "min_lrs",
    "warmup_max_lr": "max_lrs",
    "cycle_min_lr": "min_lrs",
    "cycle_max_lr": "max_lrs",
    "cycle_first_step_size": "first_step_size",
    "cycle_second_step_size": "second_step_size",
    "cycle_first_stair_count": "first_stair_count",
    "cycle_second_stair_count": "second_stair_count",
}
# Those of them that have a value for each param group.
OF_GROUPS = frozenset({"min_lr", "min_lrs", "max_lrs"})


class ScheduleOfIterations:
    """Sets the learning rates of an optimizer's groups from the number of the last step.

    Args:
        optimizer: A torch optimizer, or a wrapper with the attribute ``optimizer``.
        params: The arguments of the constructor: a number for all groups, or a list of one for each.

    Attributes:
        optimizer: The torch optimizer.
        org_lrs: The rate that each group had.
        last_batch_iteration: The number of the last step; -1 before the first.

    Raises:
        ConfigError: A list has another length than there are groups.
        TypeError: ``optimizer`` is no torch optimizer and wraps none.
        ValueError: A number of steps is missing or too small.
    """

    def __init__(self, optimizer: Any, params: dict[str, Any]) -> None:
        self.optimizer = torch_optimizer(optimizer)
        self.last_batch_iteration: int = params.pop("last_batch_iteration")
        params = {name: list(value) if isinstance(value, tuple) else value for name, value in params.items()}
        _check(params)
        own_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.org_lrs = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in own_rates]
        self._attributes = {name: ATTRIBUTES.get(name, name) for name in params}
        of_groups = params_of_groups(params, len(own_rates))
        for name, attribute in self._attributes.items():
            if attribute in OF_GROUPS:
                pairs = zip(of_groups, self.org_lrs, strict=True)
                params[name] = [rate if values[name] is None else values[name] for values, rate in pairs]
            setattr(self, attribute, params[name])
        self._last_lr: list[Any] = []
        if self.last_batch_iteration == -1:
            self._write()

    def _params(self) -> list[dict[str, Any]]:
        """Return the parameters of each group."""
        params = {name: getattr(self, attribute) for name, attribute in self._attributes.items()}
        return params_of_groups(params, len(self.optimizer.param_groups))

    def _write(self) -> None:
        self._last_lr = write_rates(self.optimizer.param_groups, self.get_lr())

    def get_lr(self) -> list[Any]:
        """Return the rate of each group at ``last_batch_iteration``."""
        # A script may derive a class of its own from one of these.
        rate = next(RATES[cls.__name__] for cls in type(self).__mro__ if cls.__name__ in RATES)
        updates = self.last_batch_iteration + 1
        return [rate(params, base, updates) for params, base in zip(self._params(), self.org_lrs, strict=True)]

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
        super().__init__(optimizer, _arguments(locals()))


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
        super().__init__(optimizer, _arguments(locals()))


class WarmupDecayLR(ScheduleOfIterations):
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
        super().__init__(optimizer, _arguments(locals()))


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
        super().__init__(optimizer, _arguments(locals()))

    def get_lr_ratio(self) -> float:
        """Return the factor of each group's own rate at ``last_batch_iteration``."""
        return float(RATES["WarmupCosineLR"](self._params()[0], 1.0, self.last_batch_iteration + 1))


class OneCycle(ScheduleOfIterations):
    """One cycle of the rate up and down, then decay; momentum moves the other way (arXiv 1803.09820)."""

    cycle_momentum: bool
    first_step_size: int
    second_step_size: int

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
        if cycle_momentum and "betas" not in torch_optimizer(optimizer).defaults:
            log.warning("OneCycle: %s has no betas, so no momentum is cycled", type(optimizer).__name__)
            cycle_momentum = False
        if cycle_second_step_size is None:
            cycle_second_step_size = cycle_first_step_size
        if cycle_second_stair_count is None:
            cycle_second_stair_count = cycle_first_stair_count
        super().__init__(optimizer, _arguments(locals()))

    @property
    def step_ratio(self) -> float:
        """The part of the cycle in which the rate rises."""
        return self.first_step_size / (self.first_step_size + self.second_step_size)

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """Return the betas of each group at ``last_batch_iteration``; None where momentum is not cycled.

        As in DeepSpeed, they begin with the high momentum, and the first update has the low one.
        """
        if not self.cycle_momentum:
            return None
        momenta = [one_cycle_momentum(params, self.last_batch_iteration + 1) for params in self._params()]
        return [(mom, *group["betas"][1:]) for mom, group in zip(momenta, self.optimizer.param_groups, strict=True)]

    def _write(self) -> None:
        super()._write()
        for params, group in zip(self._params(), self.optimizer.param_groups, strict=True):
            write_one_cycle_momentum(group, params, self.last_batch_iteration + 1)


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


def _arguments(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the schedule's parameters among the local variables of a constructor."""
    return {name: value for name, value in variables.items() if name not in ("self", "optimizer", "__class__")}


def _check(params: dict[str, Any]) -> None:
    """Check the values as DeepSpeed does, and warn where it warns.

    Raises:
        ValueError: A number of steps is missing or too small.
    """
    smallest = {
        "warmup_num_steps": 1,
        "lr_range_test_step_size": 1,
        "cycle_first_step_size": 1,
        "cycle_second_step_size": 0,
    }
    for name, limit in smallest.items():
        # None is no number of steps either.
        steps = params.get(name, limit)
        if not isinstance(steps, (int, float)) or steps < limit:
            raise ValueError(f"{name} is a number of at least {limit}; found {steps!r}")
    if params.get("warmup_type", "log") not in ("log", "linear"):
        log.warning('warmup_type is "log" or "linear"; found %r, and "log" is taken', params["warmup_type"])
        params["warmup_type"] = "log"
    total, warm = params.get("total_num_steps"), max(2, params.get("warmup_num_steps", 0))
    if total is not None and total < warm:
        log.warning("total_num_steps (%d) is less than warmup_num_steps (%d)", total, warm)


def write_rates(groups: Sequence[dict[str, Any]], rates: Sequence[Any]) -> list[Any]:
    """Write a rate into each group, a tensor in place, and return the groups' rates."""
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(float(rate))
        else:
            group["lr"] = rate
    return [group["lr"] for group in groups]
