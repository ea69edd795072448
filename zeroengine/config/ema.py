"""The section of the moving average of the weights."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Gt, Lt

from zeroengine.config.fields import AUTO, Section
from zeroengine.config.precision import FLOATS


class Ema(Section):
    """An exponential moving average of the weights, kept beside the optimizer's states."""

    decay: Annotated[float, Gt(0), Lt(1)]
    """After each step the average becomes `decay` * average + (1 - `decay`) * weights."""
    dtype: Annotated[Literal["fp32", "bf16"], AUTO] = "fp32"
    """Dtype of the average, which takes 4 bytes a parameter in fp32, over the ranks. bf16 takes 2, and is rounded
    stochastically."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the average."""
        return FLOATS[self.dtype]
