"""`scheduler`: DeepSpeed's five learning-rate schedules and their parameters.

Steps count optimizer updates, not micro-steps. The schedules themselves are built by the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from zeroengine.config.fields import AUTO, Auto, CheckedBy, Count, Decay, Fraction, NonNegative, Positive, Section


class _Warmup(Section):
    warmup_num_steps: Annotated[Count, AUTO] = 1000
    """Steps of warm-up."""
    warmup_type: Annotated[Literal["log", "linear"], AUTO] = "log"
    """Shape of the warm-up."""


class WarmupLRParams(_Warmup):
    warmup_min_lr: Annotated[NonNegative, AUTO] = 0.0
    """Learning rate at the first step."""
    warmup_max_lr: Annotated[NonNegative | None, AUTO] = None
    """Learning rate after warm-up; null or "auto": each param group's own."""


class WarmupDecayLRParams(_Warmup):
    total_num_steps: Annotated[Positive, AUTO]
    """Step at which the learning rate reaches 0."""
    warmup_min_lr: Annotated[NonNegative, AUTO] = 0.0
    """Learning rate at the first step."""
    warmup_max_lr: Annotated[NonNegative | None, Auto(None)] = 0.001
    """Learning rate after warm-up; "auto": each param group's own."""


class WarmupCosineLRParams(_Warmup):
    total_num_steps: Annotated[Positive, AUTO]
    """Step at which the cosine ends."""
    warmup_min_ratio: Annotated[Fraction, AUTO] = 0.0
    """Learning rate at the first step, as a fraction of each group's own."""
    cos_min_ratio: Annotated[Fraction, AUTO] = 0.0001
    """Learning rate at the end, as a fraction of each group's own."""


class OneCycleParams(Section):
    cycle_min_lr: Annotated[NonNegative, AUTO]
    """Learning rate at the start and end of the cycle."""
    cycle_max_lr: Annotated[NonNegative, AUTO]
    """Learning rate at the peak."""
    decay_lr_rate: Annotated[NonNegative, AUTO] = 0.0
    """Decay rate of the learning rate after the cycle."""
    cycle_first_step_size: Annotated[Positive, AUTO] = 2000
    """Steps of the rising half."""
    cycle_second_step_size: Annotated[Count | None, AUTO] = None
    """Steps of the falling half; null: as many as the rising half."""
    cycle_first_stair_count: Annotated[Count, AUTO] = 0
    """Stairs in the rising half; 0: continuous."""
    cycle_second_stair_count: Annotated[Count | None, AUTO] = None
    """Stairs in the falling half; null: as many as in the rising half."""
    decay_step_size: Annotated[Count, AUTO] = 0
    """Steps per decay after the cycle; 0: no decay."""
    cycle_momentum: bool = True
    """Cycle the momentum (Adam: the first beta) against the learning rate."""
    cycle_min_mom: Annotated[Decay, AUTO] = 0.8
    """Momentum at the peak."""
    cycle_max_mom: Annotated[Decay, AUTO] = 0.9
    """Momentum at the start and end of the cycle."""
    decay_mom_rate: Annotated[NonNegative, AUTO] = 0.0
    """Decay rate of the momentum after the cycle."""


class LRRangeTestParams(Section):
    lr_range_test_min_lr: Annotated[NonNegative, AUTO] = 0.001
    """Learning rate at the first step."""
    lr_range_test_step_size: Annotated[Positive, AUTO] = 2000
    """Steps between increases."""
    lr_range_test_step_rate: Annotated[NonNegative, AUTO] = 1.0
    """Rate of increase."""
    lr_range_test_staircase: bool = False
    """Increase in stairs, not continuously."""


class WarmupLR(Section):
    type: Literal["WarmupLR"]
    """Rise from warmup_min_lr to warmup_max_lr, then stay."""
    params: Annotated[dict[str, Any], CheckedBy(WarmupLRParams)] = WarmupLRParams().model_dump()
    """Its parameters."""


class WarmupDecayLR(Section):
    type: Literal["WarmupDecayLR"]
    """Rise, then fall linearly to 0 at total_num_steps."""
    params: Annotated[dict[str, Any], CheckedBy(WarmupDecayLRParams)]
    """Its parameters."""


class WarmupCosineLR(Section):
    type: Literal["WarmupCosineLR"]
    """Rise, then fall along a cosine until total_num_steps."""
    params: Annotated[dict[str, Any], CheckedBy(WarmupCosineLRParams)]
    """Its parameters."""


class OneCycle(Section):
    type: Literal["OneCycle"]
    """One cycle up and down, then decay; momentum moves the other way (arXiv 1803.09820)."""
    params: Annotated[dict[str, Any], CheckedBy(OneCycleParams)]
    """Its parameters."""


class LRRangeTest(Section):
    type: Literal["LRRangeTest"]
    """A growing learning rate, to find the largest that trains (arXiv 1506.01186)."""
    params: Annotated[dict[str, Any], CheckedBy(LRRangeTestParams)] = LRRangeTestParams().model_dump()
    """Its parameters."""


SchedulerConfig = Annotated[
    WarmupLR | WarmupDecayLR | WarmupCosineLR | OneCycle | LRRangeTest, Field(discriminator="type")
]
SCHEDULER_TYPES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
