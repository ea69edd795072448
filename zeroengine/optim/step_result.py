"""The settings and the result of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from zeroengine import ops


@dataclass(frozen=True)
class StepSettings:
    """The engine's settings of one step.

    Attributes:
        divisor: Divides the summed gradient: ranks, micro-steps and loss scale.
        limit: The largest norm of the gradient; 0 for no clipping.
        skip: Whether a gradient that is not finite updates nothing.
        label: Names the norm's collective; ranks that differ in it are refused.
    """

    divisor: float
    limit: float
    skip: bool
    label: str

    def factor(self, squared_norm: torch.Tensor) -> torch.Tensor:
        """Return the gradient's factor, its norm, and whether the step is skipped. See ``ops.gradient_factor``."""
        return ops.gradient_factor(squared_norm, divisor=self.divisor, limit=self.limit, skip=self.skip)


class StepResult:
    """The result of a step, true if the step updated parameters. Reading it waits for the norm, not for the update.

    It is equal to the bool that it stands for, and is pickled as that bool.

    Args:
        read: Returns the gradient norm and whether parameters were updated. It may wait for the device.

    Attributes:
        on_query: Is called once, when the result is first used as a bool.
    """

    def __init__(self, read: Callable[[], tuple[float, bool]]) -> None:
        self._read = cache(read)
        self.on_query: Callable[[StepResult], None] | None = None

    def __bool__(self) -> bool:
        # Cleared first: the callback itself asks for the truth value.
        on_query, self.on_query = self.on_query, None
        if on_query is not None:
            on_query(self)
        return self._read()[1]

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # The result refers to the engine and to memory of a device, so the pickle holds the answer alone.
        return bool, (bool(self),)

    def __repr__(self) -> str:
        return "updated" if self else "skipped"

    @property
    def grad_norm(self) -> float:
        """Return the norm of the mean gradient before clipping."""
        return self._read()[0]
