"""The settings and the result of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from zeroengine import ops
from zeroengine.utils.tensors import HostCopy

# ``GradientFactor.skip`` of a step that is an outlier.
OUTLIER = 2.0


class GradientFactor(NamedTuple):
    """The three values of ``ops.gradient_factor``, in their order.

    Attributes:
        factor: Multiplies the summed gradient: the clip factor over the divisor.
        grad_norm: The norm of the mean gradient, before clipping.
        skip: 1 if the step is skipped, because of an overflow or for lack of weight; ``OUTLIER`` (2) as an outlier;
            else 0.
    """

    factor: float
    grad_norm: float
    skip: float


@dataclass(frozen=True)
class StepSettings:
    """The engine's settings of one step.

    Attributes:
        divisor: Divides the summed gradient: ranks, micro-steps and loss scale. If losses have weights, the sum of
            these divides it as well, in place of ranks and micro-steps.
        limit: The largest norm of the gradient; 0 for no clipping.
        skip: Whether a gradient that is not finite updates nothing.
        label: Names the norm's collective. Ranks with different labels get an error.
        number: The number of the step, counted from 1, skipped ones included.
        is_weighted: Whether losses have weights. A step whose weights add up to 0 updates nothing.
    """

    divisor: float
    limit: float
    skip: bool
    label: str
    number: int = 1
    is_weighted: bool = False

    def factor(self, squared_norm: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the three values of ``GradientFactor``, in float64 on the device of ``squared_norm``.

        Args:
            squared_norm: That of the summed gradient, before any division. 0-d float64.
            weights: The sum of the weights of all losses. 0-d float64, on the same device.
        """
        weight = weights if self.is_weighted else None
        return ops.gradient_factor(squared_norm, divisor=self.divisor, weight=weight, limit=self.limit, skip=self.skip)


class StepResult:
    """The result of a step: true if the step updated parameters. Reading it waits for the norm, not for the update.

    It compares equal to that bool and is pickled as it.

    Args:
        read: Returns what the step was computed with. It may wait for the device.

    Attributes:
        on_query: Called once, when the result is first used as a bool.
    """

    def __init__(self, read: Callable[[], GradientFactor]) -> None:
        self._read = cache(read)
        self.on_query: Callable[[StepResult], None] | None = None

    def __bool__(self) -> bool:
        # Cleared first: the callback itself asks for the truth value.
        on_query, self.on_query = self.on_query, None
        if on_query is not None:
            on_query(self)
        return self.updated

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # The result refers to the engine and to device memory, so the pickle holds only the bool.
        return bool, (bool(self),)

    def __repr__(self) -> str:
        return "updated" if self else "skipped"

    @property
    def grad_norm(self) -> float:
        """Return the norm of the mean gradient before clipping."""
        return self._read().grad_norm

    @property
    def updated(self) -> bool:
        """Whether parameters were updated. Unlike the truth value this calls nothing."""
        return not self._read().skip

    @property
    def is_outlier(self) -> bool:
        """Whether the step was skipped as an outlier (``skip_steps``)."""
        return self._read().skip == OUTLIER


@dataclass(frozen=True)
class IssuedStep:
    """A step that has been taken, whose result may not be known yet.

    Attributes:
        number: The number of steps so far, updates and skipped ones.
        rates: The learning rate of each param group, a number or a tensor.
        loss_scale: The factor of the loss.
        loss: The mean of what the backwards of the step were given on this rank, and its weight in the mean over ranks;
            None if no loss was noted. See ``StepLosses.mean``.
        result: Knows the norm, perhaps after a wait.
    """

    number: int
    rates: Sequence[Any]
    loss_scale: float
    loss: HostCopy | None
    result: StepResult
