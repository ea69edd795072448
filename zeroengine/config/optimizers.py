"""`optimizer`: the known types and their parameters, and any other class by its import path.

What comes out is ready to be called: `cls(groups, **config.params)`. DeepSpeed's "Adam" decays weights decoupled
unless `adam_w_mode` is false, so it comes out as AdamW.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Discriminator, Field, Tag, field_serializer, field_validator, model_validator

from zeroengine.config.fields import AUTO, MAX_FLOAT, Betas, CheckedBy, Decay, NonNegative, Section

IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"


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


class AdamWParamsOfFile(AdamWParams):
    adam_w_mode: Annotated[bool, AUTO, Field(exclude=True)] = True
    """true, as the type says; DeepSpeed's files have it."""

    @model_validator(mode="after")
    def _decouples(self) -> AdamWParamsOfFile:
        if not self.adam_w_mode:
            raise ValueError(
                'adam_w_mode is false, but the type AdamW always decouples weight decay; write "type": "Adam" for L2'
            )
        return self


class SGDParams(Section):
    lr: Annotated[NonNegative, AUTO] = 1e-3
    """Learning rate."""
    momentum: Annotated[Decay, AUTO] = 0.0
    """Momentum factor."""
    dampening: Annotated[Annotated[float, Ge(-MAX_FLOAT), Le(MAX_FLOAT)], AUTO] = 0.0
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
    params: Annotated[dict[str, Any], CheckedBy(AdamWParamsOfFile)] = AdamWParams().model_dump()
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


class AdagradParams(Section):
    lr: Annotated[NonNegative, AUTO] = 1e-2
    """Learning rate."""
    lr_decay: Annotated[NonNegative, AUTO] = 0.0
    """Decay of the learning rate."""
    weight_decay: Annotated[NonNegative, AUTO] = 0.0
    """L2 weight decay."""
    initial_accumulator_value: Annotated[NonNegative, AUTO] = 0.0
    """What the sum of squares starts at."""
    eps: Annotated[NonNegative, AUTO] = 1e-10
    """Added to the root of the sum of squares."""


class Adagrad(Section):
    type: Literal["Adagrad"]
    """Rates that fall with the gradients seen so far (Duchi et al., JMLR 2011)."""
    params: Annotated[dict[str, Any], CheckedBy(AdagradParams)] = AdagradParams().model_dump()
    """Its hyperparameters."""


class LionParams(Section):
    lr: Annotated[NonNegative, AUTO] = 1e-4
    """Learning rate: a third to a tenth of AdamW's."""
    betas: Annotated[Betas, AUTO] = (0.9, 0.99)
    """Decay rates: of the update's direction, and of the momentum."""
    weight_decay: Annotated[NonNegative, AUTO] = 0.0
    """Decoupled weight decay: three to ten times AdamW's."""


class Lion(Section):
    type: Literal["Lion"]
    """The sign of a momentum (arXiv 2302.06675); half of Adam's state."""
    params: Annotated[dict[str, Any], CheckedBy(LionParams)] = LionParams().model_dump()
    """Its hyperparameters."""


class ByImportPath(Section):
    type: Annotated[str, Field(pattern=f"^{IMPORT_PATH}$")]
    """A torch.optim.Optimizer class by its import path, such as "torch.optim.RAdam" or "mypackage.optim.Mine"."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class; "auto" leaves one out."""

    @field_validator("params")
    @classmethod
    def _as_json(cls, params: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(params, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"not JSON ({error}); for other arguments pass the optimizer to initialize(optimizer=...)"
            ) from None
        return {name: value for name, value in params.items() if value != "auto"}


def is_import_path(kind: Any) -> bool:
    """Whether an optimizer's `type` is to be imported."""
    return isinstance(kind, str) and re.fullmatch(IMPORT_PATH, kind) is not None


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return ByImportPath.__name__ if is_import_path(kind) else None if kind is None else str(kind)


OptimizerConfig = Annotated[
    Annotated[Adam, Tag("Adam")]
    | Annotated[AdamW, Tag("AdamW")]
    | Annotated[SGD, Tag("SGD")]
    | Annotated[Adagrad, Tag("Adagrad")]
    | Annotated[Lion, Tag("Lion")]
    | Annotated[ByImportPath, Tag("ByImportPath")],
    Discriminator(_kind),
]
OPTIMIZER_TYPES = ("Adam", "AdamW", "SGD", "Adagrad", "Lion")
# DeepSpeed's others, and why they have no name here.
_WHOLE = "its update of an element looks at the whole parameter, so it cannot run on shards"
_COMPRESSED = "it compresses its communication, which changes results"
OTHER_TYPES = {
    **dict.fromkeys(("Lamb", "Muon", "OneBitLamb"), _WHOLE),
    **dict.fromkeys(("OneBitAdam", "ZeroOneAdam"), _COMPRESSED),
}
