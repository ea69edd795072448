"""DeepSpeed's learning-rate schedules by name, on torch's LambdaLR.

A schedule counts steps (optimizer updates). Formulas follow ``deepspeed.runtime.lr_schedules``, with the
first update at step 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ..config import Config

LRSchedulerLike = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None


def make_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer, config: Config) -> Any:
    """The scheduler passed in, or made by the callable passed in, else what the configuration names."""
    if scheduler is not None:
        return scheduler(optimizer) if callable(scheduler) and not hasattr(scheduler, "step") else scheduler
    if config.scheduler is None:
        return None
    kind, params = config.scheduler.type, config.scheduler.params
    if kind == "OneCycle":
        return _OneCycle(optimizer, params)
    rate = {
        "WarmupLR": _warmup,
        "WarmupDecayLR": _warmup_decay,
        "WarmupCosineLR": _warmup_cosine,
        "LRRangeTest": _range_test,
    }[kind]
    bases = [float(group["lr"]) for group in optimizer.param_groups]
    # LambdaLR multiplies the base rate; these schedules name rates, so divide it out where it is not 0.
    for group, base in zip(optimizer.param_groups, bases, strict=True):
        group["initial_lr"] = 1.0 if base == 0 else base
    return LambdaLR(optimizer, [_relative(rate, params, base) for base in bases])


Rate = Callable[[dict[str, Any], float, int], float]  # parameters, the group's own rate, step


def _relative(rate: Rate, params: dict[str, Any], base: float) -> Callable[[int], float]:
    return lambda step: rate(params, base, step) / (base or 1.0)


def _rise(params: dict[str, Any], step: int) -> float:
    """How far the warm-up is, from 0 to 1."""
    total = params["warmup_num_steps"]
    if step >= total:
        return 1.0
    if params["warmup_type"] == "log":
        return math.log(step + 1) / math.log(max(2, total))
    return step / max(1, total)


def _between(low: float, high: float, part: float) -> float:
    return low + (high - low) * part


def _peak(params: dict[str, Any], base: float) -> float:
    return base if params["warmup_max_lr"] is None else params["warmup_max_lr"]


def _warmup(params: dict[str, Any], base: float, step: int) -> float:
    return _between(params["warmup_min_lr"], _peak(params, base), _rise(params, step))


def _warmup_decay(params: dict[str, Any], base: float, step: int) -> float:
    low, high = params["warmup_min_lr"], _peak(params, base)
    warm, total = params["warmup_num_steps"], params["total_num_steps"]
    if step < warm:
        return _between(low, high, _rise(params, step))
    return _between(low, high, max(0.0, (total - step) / max(1.0, total - warm)))


def _warmup_cosine(params: dict[str, Any], base: float, step: int) -> float:
    warm, total = params["warmup_num_steps"], params["total_num_steps"]
    if step < warm:
        return base * _between(params["warmup_min_ratio"], 1.0, _rise(params, step))
    part = min(1.0, (step - warm + 1) / max(1, total - warm))
    return base * _between(params["cos_min_ratio"], 1.0, (1 + math.cos(math.pi * part)) / 2)


def _range_test(params: dict[str, Any], base: float, step: int) -> float:
    interval = (step + 1) / params["lr_range_test_step_size"]
    if params["lr_range_test_staircase"]:
        interval = float(math.floor(interval))
    return params["lr_range_test_min_lr"] * (1 + interval * params["lr_range_test_step_rate"])


class _OneCycle(LRScheduler):
    """Rate up and down, momentum down and up, then decay (arXiv 1803.09820, DeepSpeed's OneCycle)."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: dict[str, Any]) -> None:
        self._params = params
        self._rising = params["cycle_first_step_size"]
        second = params["cycle_second_step_size"]
        self._falling = self._rising if second is None else second
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        p, step = self._params, self.last_epoch
        lr = self._cycle(p["cycle_min_lr"], p["cycle_max_lr"], step)
        after = self._after(step)
        if after > 0:
            lr = p["cycle_min_lr"] / (1 + p["decay_lr_rate"] * after)
        if p["cycle_momentum"]:
            momentum = self._cycle(p["cycle_max_mom"], p["cycle_min_mom"], step)
            if after > 0:
                momentum = min(0.999, p["cycle_max_mom"] * (1 + p["decay_mom_rate"] * after))
            for group in self.optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = (momentum, group["betas"][1])
                elif "momentum" in group:
                    group["momentum"] = momentum
        return [lr] * len(self.optimizer.param_groups)

    def _cycle(self, ends: float, peak: float, step: int) -> float:
        if step <= self._rising:
            stairs, part = self._params["cycle_first_stair_count"], step / self._rising
        else:
            second = self._params["cycle_second_stair_count"]
            stairs = self._params["cycle_first_stair_count"] if second is None else second
            part = max(0.0, 1 - (step - self._rising) / max(1, self._falling))
        if stairs:
            part = math.floor(part * stairs) / stairs
        return _between(ends, peak, part)

    def _after(self, step: int) -> float:
        """Decay intervals since the cycle ended."""
        size = self._params["decay_step_size"]
        return max(0, step - self._rising - self._falling) / size if size else 0.0
