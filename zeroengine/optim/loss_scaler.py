"""The loss scale: gradients of fp16 compute are kept from underflowing by scaling the loss.

Dynamic scaling follows DeepSpeed's ``DynamicLossScaler`` (Micikevicius et al., arXiv 1710.03740, section 3.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from zeroengine.config import FP16
from zeroengine.errors import ZeroEngineError

FACTOR = 2.0


@dataclass
class LossScaler:
    """A scale, and how far it is from growing and shrinking.

    Attributes:
        scale: what the loss is multiplied by.
        dynamic: whether overflows halve it, and the step after ``window`` ones without overflow doubles it.
        hysteresis: overflows before it halves.
        consecutive: whether a step without overflow refills the hysteresis; else only growing does.
        minimum: the smallest scale.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0
    hysteresis_left: int = 2
    steps: int = 0
    last_overflow: int = -1

    @classmethod
    def of(cls, config: FP16) -> LossScaler:
        """The scaler that the ``fp16`` section asks for."""
        dynamic = config.loss_scale == 0
        return cls(
            scale=max(2.0**config.initial_scale_power, config.min_loss_scale) if dynamic else config.loss_scale,
            dynamic=dynamic,
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
            consecutive=config.consecutive_hysteresis,
            minimum=config.min_loss_scale,
            hysteresis_left=config.hysteresis,
        )

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` times the scale, at least in fp32, for the product may be beyond the range of fp16."""
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale

    @property
    def exhausted(self) -> bool:
        """Whether an overflow now could not be answered by a smaller scale."""
        return self.dynamic and self.scale <= self.minimum and self.hysteresis_left <= 1

    def update(self, overflow: bool) -> None:
        """After a step, or one that was skipped for ``overflow``."""
        if self.dynamic and overflow:
            if self.hysteresis_left <= 1:
                self.scale = max(self.scale / FACTOR, self.minimum)
            else:
                self.hysteresis_left -= 1
            self.last_overflow = self.steps
        elif self.dynamic:
            before = self.steps - self.last_overflow - 1  # steps without overflow so far; this one is another
            grows = before > 0 and before % self.window == 0
            if self.consecutive or grows:
                self.hysteresis_left = self.hysteresis
            if grows and self.scale < 2.0**126:  # the scaled loss is fp32
                self.scale *= FACTOR
        self.steps += 1

    def set(self, scale: float) -> None:
        """Takes another scale.

        Raises:
            ZeroEngineError: not a positive finite number, or below the minimum of a dynamic scale.
        """
        if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0):
            raise ZeroEngineError(
                f"loss_scale is a positive number, found {scale!r}. For dynamic scaling write "
                '"fp16": {"loss_scale": 0} in the configuration.'
            )
        if self.dynamic and scale < self.minimum:
            raise ZeroEngineError(
                f"loss_scale is at least fp16.min_loss_scale, {self.minimum:g}, found {scale!r}. Lower that in the "
                "configuration, or write a static fp16.loss_scale there."
            )
        self.scale = float(scale)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("scale", "hysteresis_left", "steps", "last_overflow")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.state_dict():
            setattr(self, name, state[name])
