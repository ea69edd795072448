"""The course of a step whose backend waits for the norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zeroengine.optim.step_reduction import StepReduction
from zeroengine.optim.step_result import GradientFactor, StepResult, StepSettings


def step_on_host(
    reduction: StepReduction, settings: StepSettings, update: Callable[[float, Sequence[Sequence[bool]]], None]
) -> StepResult:
    """Wait for the norm, then update unless the gradient overflowed. A collective.

    Args:
        reduction: Sums the norm and the flags over the ranks.
        settings: The settings of the step.
        update: Updates every shard. It takes the factor of the gradient, and for each unit and parameter whether there
            is a gradient.
    """
    squared_norm, has_grad = reduction.reduce_on_host(settings.label)
    factor = settings.factor(torch.tensor(squared_norm, dtype=torch.float64, device="cpu"))
    result = GradientFactor(*factor.tolist())
    # All ranks have the same sum and so the same answer: either all of them update or none does.
    if not result.overflow:
        update(result.factor, has_grad)
    return StepResult(lambda: (result.grad_norm, not result.overflow))
