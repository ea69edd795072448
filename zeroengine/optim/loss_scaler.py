"""The loss scale, which keeps the gradients of fp16 computation from underflowing.

Dynamic scaling follows DeepSpeed's ``DynamicLossScaler`` (Micikevicius et al., arXiv 1710.03740, section 3.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from zeroengine.config import FP16
from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.step_losses import weighted

FACTOR = 2.0


class LossScaler:
    """A loss scale, and the counters that decide when it grows and shrinks.

    Args:
        config: The ``fp16`` section of the configuration. None: losses are not scaled.

    Attributes:
        scale: Multiplies the loss.
        dynamic: Whether overflows halve the scale, and steps without overflow double it.
        hysteresis_left: The number of overflows until the scale halves.
        steps: Steps so far, skipped ones included.
        last_overflow: The number of the last step that overflowed; -1 before the first.
    """

    def __init__(self, config: FP16 | None = None) -> None:
        config = config or FP16(loss_scale=1.0)
        self._config = config
        self.dynamic = config.loss_scale == 0
        self.scale = config.loss_scale
        if self.dynamic:
            self.scale = max(2.0**config.initial_scale_power, config.min_loss_scale)
        self.hysteresis_left, self.steps, self.last_overflow = config.hysteresis, 0, -1

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` times the scale, at least in fp32, because the product may overflow fp16."""
        return weighted(loss, self.scale)

    @property
    def exhausted(self) -> bool:
        """Whether the next overflow cannot lower the scale any more."""
        return self.dynamic and self.scale <= self._config.min_loss_scale and self.hysteresis_left <= 1

    def update(self, overflow: bool) -> None:
        """Count a step, and adapt the scale to whether it overflowed."""
        if self.dynamic and overflow:
            # A single overflow may be an outlier, so the first overflows only count down. Halving the scale does not
            # reset the count.
            if self.hysteresis_left <= 1:
                self.scale = max(self.scale / FACTOR, self._config.min_loss_scale)
            else:
                self.hysteresis_left -= 1
            self.last_overflow = self.steps
        elif self.dynamic:
            # As in DeepSpeed, the scale doubles one step after `loss_scale_window` steps without overflow.
            steps_without_overflow = self.steps - self.last_overflow - 1
            grows = steps_without_overflow > 0 and steps_without_overflow % self._config.loss_scale_window == 0
            if self._config.consecutive_hysteresis or grows:
                self.hysteresis_left = self._config.hysteresis
            # The scaled loss is fp32, whose largest power of two is 2**127.
            if grows and self.scale < 2.0**126:
                self.scale *= FACTOR
        self.steps += 1

    def set(self, scale: float) -> None:
        """Set the scale. A dynamic scale continues from it.

        Raises:
            ZeroEngineError: The scale is not a positive finite number, or is below the minimum of a dynamic scale.
        """
        if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0):
            raise ZeroEngineError(
                f"loss_scale is a positive number, found {scale!r}. For dynamic scaling write "
                '"fp16": {"loss_scale": 0} in the configuration.'
            )
        if self.dynamic and scale < self._config.min_loss_scale:
            raise ZeroEngineError(
                f"loss_scale is at least fp16.min_loss_scale, {self._config.min_loss_scale:g}, found {scale!r}. Lower "
                "that in the configuration, or write a static fp16.loss_scale there."
            )
        self.scale = float(scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counters, as a checkpoint keeps them."""
        return {name: getattr(self, name) for name in ("scale", "hysteresis_left", "steps", "last_overflow")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the scale and its counters to those of a ``state_dict``."""
        for name in self.state_dict():
            setattr(self, name, state[name])
