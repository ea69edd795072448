"""`optimizer`: the known types and their parameters.

What comes out is ready for torch: `getattr(torch.optim, config.type)(groups, **config.params)`. DeepSpeed's "Adam"
decays weights decoupled unless `adam_w_mode` is false, so it comes out as AdamW.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, model_validator

from zeroengine.config.fields import AUTO, Betas, CheckedBy, Decay, NonNegative, Section


class AdamWParams(Section):
    lr: Annotated[NonNegative, AUTO] = 1e-3
    """Learning rate."""
    betas: Annotated[Betas, AUTO] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: Annotated[NonNegative, AUTO] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[NonNegative, AUTO] = 0.0
    """Weight decay. The default is DeepSpeed's, 0; that of torch.optim.AdamW is 0.01."""


class AdamParams(AdamWParams):
    adam_w_mode: bool = True
    """true: decoupled weight decay, the type comes out as AdamW. false: L2, as in torch.optim.Adam."""


class SGDParams(Section):
    lr: Annotated[NonNegative, AUTO] = 1e-3
    """Learning rate."""
    momentum: Annotated[Decay, AUTO] = 0.0
    """Momentum factor."""
    dampening: Annotated[float, AUTO] = 0.0
    """Dampening for momentum."""
    weight_decay: Annotated[NonNegative, AUTO] = 0.0
    """L2 weight decay."""
    nesterov: bool = False
    """Nesterov momentum; needs a momentum above 0 and no dampening."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGDParams:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError('nesterov needs momentum above 0 and dampening 0; write for example "momentum": 0.9')
        return self


class AdamW(Section):
    type: Literal["AdamW"]
    """Adam with decoupled weight decay."""
    params: Annotated[dict[str, Any], CheckedBy(AdamWParams)] = AdamWParams().model_dump()
    """Its hyperparameters."""


class Adam(Section):
    type: Literal["Adam"]
    """Adam; as in DeepSpeed, weight decay is decoupled unless adam_w_mode is false."""
    params: Annotated[dict[str, Any], CheckedBy(AdamParams)] = AdamParams().model_dump()
    """Its hyperparameters."""

    @model_validator(mode="after")
    def _as_torch(self) -> Any:
        params = {name: value for name, value in self.params.items() if name != "adam_w_mode"}
        if self.params.get("adam_w_mode", False):
            return AdamW(type="AdamW", params=params)
        return self.model_copy(update={"params": params})

    @field_serializer("params")
    def _as_written(self, params: dict[str, Any]) -> dict[str, Any]:
        return {**params, "adam_w_mode": False}


class SGD(Section):
    type: Literal["SGD"]
    """Stochastic gradient descent, with momentum if asked."""
    params: Annotated[dict[str, Any], CheckedBy(SGDParams)] = SGDParams().model_dump()
    """Its hyperparameters."""


OptimizerConfig = Annotated[Adam | AdamW | SGD, Field(discriminator="type")]
OPTIMIZER_TYPES = ("Adam", "AdamW", "SGD")
