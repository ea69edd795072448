"""The largest norm of the gradient, of every step and of the step in progress."""

from __future__ import annotations

import math
from typing import Any

from zeroengine.errors import ZeroEngineError


class GradientClipping:
    """The largest norm of the gradient of the parameters that the optimizer holds.

    Args:
        max_norm: The limit that the configuration names; 0 for no clipping.

    Attributes:
        max_norm: The limit of the following steps, which the user may change; 0 for no clipping.
    """

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm
        # The limit that ``clip_grad_norm_`` set for the step in progress.
        self._clip_once: float | None = None

    def set(self, max_norm: float) -> None:
        """Clip the following steps to ``max_norm``; 0 clips nothing."""
        max_norm = checked_norm(max_norm, "gradient_clipping", zero=True)
        self.max_norm = 0.0 if math.isinf(max_norm) else max_norm

    # -- the step in progress ---------------------------------------------------------------------

    @property
    def has_clipped(self) -> bool:
        """Whether ``clip_once`` was called in the step in progress."""
        return self._clip_once is not None

    def clip_once(self, max_norm: float) -> None:
        """Clip the step in progress to ``max_norm``."""
        # The gradient is scaled only in the update, so a second call keeps the smaller limit.
        self._clip_once = min(max_norm, self._clip_once or math.inf)

    def drop_gradients(self) -> None:
        """Undo ``clip_once``, because its limit must not apply to the gradients that follow."""
        self._clip_once = None

    def take_limit(self) -> float:
        """Return the limit of the step that is taken now; 0 for no clipping."""
        # The limit of ``clip_once`` applies to one step, even if that is skipped.
        limits, self._clip_once = (self.max_norm, self._clip_once or 0.0), None
        return min((limit for limit in limits if 0 < limit < math.inf), default=0.0)

    def check_backward(self) -> None:
        """Refuse a backward after ``clip_once``, whose norm would lack its gradients."""
        if self.has_clipped:
            raise ZeroEngineError(
                "a backward after engine.clip_grad_norm_() and before step(): clip after the last backward of a step"
            )

    def check_not_clipped(self, call: str) -> None:
        """Check that ``clip_once`` was not called in the step in progress.

        Raises:
            ZeroEngineError: It was, and ``call`` replaces gradients, to which its limit would apply as well.
        """
        if self.has_clipped:
            raise ZeroEngineError(
                f"{call} after engine.clip_grad_norm_() and before step(): the limit would also apply to the new "
                "gradient. Replace gradients before clipping; to add noise to a clipped gradient, scale "
                "zeroengine.full_gradient(param) yourself and leave clip_grad_norm_() out."
            )


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
