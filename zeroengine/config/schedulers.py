"""The `scheduler` section: DeepSpeed's five learning-rate schedules and their parameters.

Steps are optimizer updates, not micro-steps. The engine builds the schedules themselves. A list has a value for each
param group of the optimizer, whose number is known when the schedule is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from zeroengine.config.fields import (
    AUTO,
    Auto,
    CheckedBy,
    Count,
    Decays,
    Fraction,
    NonNegative,
    NonNegatives,
    Positive,
    Section,
)


class _Warmup(Section):
    """Parameters that the three schedules with a warm-up share."""

    warmup_num_steps: Annotated[Count, AUTO] = 1000
    """Steps of warm-up."""
    warmup_type: Annotated[Literal["log", "linear"], AUTO] = "log"
    """Shape of the warm-up."""


class WarmupLRParams(_Warmup):
    """Parameters of WarmupLR."""

    warmup_min_lr: Annotated[NonNegatives, AUTO] = 0.0
    """Learning rate at the first step, or a list of one for each param group."""
    warmup_max_lr: Annotated[NonNegatives | None, AUTO] = None
    """Learning rate after warm-up, or a list of one for each param group. null or "auto": the rate of each param
    group."""


class WarmupDecayLRParams(WarmupLRParams):
    """Parameters of WarmupDecayLR."""

    total_num_steps: Annotated[Positive | None, Auto(None)]
    """Step at which the learning rate reaches 0. "auto": a framework fills it in."""
    warmup_max_lr: Annotated[NonNegatives | None, Auto(None)] = 0.001
    """Learning rate after warm-up, or a list of one for each param group. "auto": the rate of each param group. The
    default is DeepSpeed's, and replaces the rates of all param groups."""


class WarmupCosineLRParams(_Warmup):
    """Parameters of WarmupCosineLR."""

    total_num_steps: Annotated[Positive | None, Auto(None)]
    """Step at which the cosine ends. "auto": a framework fills it in."""
    warmup_min_ratio: Annotated[Fraction, AUTO] = 0.0
    """Learning rate at the first step, as a fraction of the rate of each param group."""
    cos_min_ratio: Annotated[Fraction, AUTO] = 0.0001
    """Learning rate at the end, as a fraction of the rate of each param group."""


class OneCycleParams(Section):
    """Parameters of OneCycle."""

    cycle_min_lr: Annotated[NonNegatives | None, Auto(None)]
    """Learning rate at the start and end of the cycle, or a list of one for each param group. "auto": a framework
    fills it in."""
    cycle_max_lr: Annotated[NonNegatives | None, Auto(None)]
    """Learning rate at the peak, or a list of one for each param group. "auto": a framework fills it in."""
    decay_lr_rate: Annotated[NonNegative, AUTO] = 0.0
    """Decay rate of the learning rate after the cycle."""
    cycle_first_step_size: Annotated[Positive, AUTO] = 2000
    """Steps of the rising half."""
    cycle_second_step_size: Annotated[Count | None, AUTO] = None
    """Steps of the falling half. null: as many as the rising half."""
    cycle_first_stair_count: Annotated[Count, AUTO] = 0
    """Stairs in the rising half. 0: a continuous rise."""
    cycle_second_stair_count: Annotated[Count | None, AUTO] = None
    """Stairs in the falling half. null: as many as in the rising half."""
    decay_step_size: Annotated[Count, AUTO] = 0
    """Steps per decay after the cycle. 0: no decay."""
    cycle_momentum: bool = True
    """Cycle the momentum (Adam: the first beta) against the learning rate."""
    cycle_min_mom: Annotated[Decays, AUTO] = 0.8
    """Momentum at the peak, or a list of one for each param group."""
    cycle_max_mom: Annotated[Decays, AUTO] = 0.9
    """Momentum at the start and end of the cycle, or a list of one for each param group."""
    decay_mom_rate: Annotated[NonNegative, AUTO] = 0.0
    """Decay rate of the momentum after the cycle."""


class LRRangeTestParams(Section):
    """Parameters of LRRangeTest."""

    lr_range_test_min_lr: Annotated[NonNegatives, AUTO] = 0.001
    """Learning rate at the first step, or a list of one for each param group."""
    lr_range_test_step_size: Annotated[Positive, AUTO] = 2000
    """Steps between increases."""
    lr_range_test_step_rate: Annotated[NonNegative, AUTO] = 1.0
    """Rate of increase."""
    lr_range_test_staircase: bool = False
    """Increase the rate in stairs instead of continuously."""


class WarmupLRConfig(Section):
    """A `scheduler` section of type "WarmupLR"."""

    type: Literal["WarmupLR"]
    """Rise from warmup_min_lr to warmup_max_lr, then stay there."""
    params: Annotated[dict[str, Any], CheckedBy(WarmupLRParams)] = WarmupLRParams().model_dump()
    """Its parameters."""


class WarmupDecayLRConfig(Section):
    """A `scheduler` section of type "WarmupDecayLR"."""

    type: Literal["WarmupDecayLR"]
    """Rise, then fall linearly to 0 at total_num_steps."""
    params: Annotated[dict[str, Any], CheckedBy(WarmupDecayLRParams)]
    """Its parameters."""


class WarmupCosineLRConfig(Section):
    """A `scheduler` section of type "WarmupCosineLR"."""

    type: Literal["WarmupCosineLR"]
    """Rise, then fall along a cosine until total_num_steps."""
    params: Annotated[dict[str, Any], CheckedBy(WarmupCosineLRParams)]
    """Its parameters."""


class OneCycleConfig(Section):
    """A `scheduler` section of type "OneCycle"."""

    type: Literal["OneCycle"]
    """One cycle up and down, then decay; momentum moves the other way (arXiv 1803.09820)."""
    params: Annotated[dict[str, Any], CheckedBy(OneCycleParams)]
    """Its parameters."""


class LRRangeTestConfig(Section):
    """A `scheduler` section of type "LRRangeTest"."""

    type: Literal["LRRangeTest"]
    """A growing learning rate, to find the largest that trains (arXiv 1506.01186)."""
    params: Annotated[dict[str, Any], CheckedBy(LRRangeTestParams)] = LRRangeTestParams().model_dump()
    """Its parameters."""


SchedulerConfig = Annotated[
    WarmupLRConfig | WarmupDecayLRConfig | WarmupCosineLRConfig | OneCycleConfig | LRRangeTestConfig,
    Field(discriminator="type"),
]
# Parameters without a default, and what to write for them.
NEEDED_PARAMS = {
    "total_num_steps": "the number of steps (updates) of the whole run, such as 10000",
    "cycle_min_lr": "the lowest learning rate, such as 0.0001",
    "cycle_max_lr": "the highest learning rate, such as 0.001",
}
SCHEDULER_TYPES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")


def long_warmup(scheduler: SchedulerConfig, total_steps: int | None) -> str | None:
    """Return a notice if the rate rises for at least as long as the run, so that it never falls or never peaks.

    Args:
        scheduler: The section.
        total_steps: The number of steps of the run, where the schedule does not say it; None: unknown.
    """
    params = scheduler.params
    name = "cycle_first_step_size" if scheduler.type == "OneCycle" else "warmup_num_steps"
    rising, total = params.get(name), params.get("total_num_steps") or total_steps
    if not rising or not total or rising < total:
        return None
    return (
        f"scheduler.params.{name} is {rising}, and the run has {total} steps: the learning rate rises until the end. "
        f"Write fewer, such as {max(1, total // 20)}, or correct the number of steps."
    )


def default_rate(scheduler: SchedulerConfig, written: Mapping[str, Any], optimizer_rate: float | None) -> str | None:
    """Return a notice if a number of DeepSpeed's, which nobody wrote, replaces the rates of the optimizer's groups.

    Args:
        scheduler: The section.
        written: The parameters as they were written.
        optimizer_rate: The rate of the configuration's optimizer; None: unknown.
    """
    name = {"WarmupDecayLR": "warmup_max_lr", "LRRangeTest": "lr_range_test_min_lr"}.get(scheduler.type, "")
    if not name or name in written or scheduler.params.get(name) == optimizer_rate:
        return None
    own = ' "auto" stands for their own rates.' if scheduler.type == "WarmupDecayLR" else ""
    return (
        f"scheduler.params.{name} is not given: {scheduler.params[name]:g} for every param group, as in DeepSpeed, "
        f"whatever their own rates are. Write a rate, or a list of one for each group.{own}"
    )
