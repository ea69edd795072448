"""Define the `optimizer` section: the known types and their parameters, and any other class by its import path.

A checked section is ready for use: `optimizer_class(groups, **section.params)`. DeepSpeed's "Adam" decouples weight
decay unless `adam_w_mode` is false, so such a section is turned into one of type "AdamW".
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Discriminator, Field, Strict, Tag, field_serializer, field_validator, model_validator

from zeroengine.config.fields import AUTO, MAX_FLOAT, Betas, CheckedBy, Decay, NonNegative, Section

IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"
IMPORTED_TAG = "import path"
# The types whose moments have 8 bits, and the type that each of them is otherwise.
EIGHT_BIT_TYPES = {"Adam8bit": "Adam", "AdamW8bit": "AdamW", "Lion8bit": "Lion"}


# DeepSpeed makes torch's class of it. The key has done its work when a section is checked.
TorchAdam = Annotated[bool, AUTO, Field(exclude=True)]


class AdamWParams(Section):
    """Parameters that AdamW and Adam share."""

    lr: Annotated[NonNegative, AUTO] = 1e-3
    """Learning rate."""
    betas: Annotated[Betas, AUTO] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: Annotated[NonNegative, AUTO] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[NonNegative, AUTO] = 0.0
    """Weight decay. The default is DeepSpeed's, 0; with torch_adam, where it is decoupled, torch.optim.AdamW's 0.01."""
    torch_adam: TorchAdam = False
    """Take torch's default of weight_decay. The update is the same."""

    @model_validator(mode="after")
    def _take_default_of_torch(self) -> AdamWParams:
        if self.torch_adam and "weight_decay" not in self.model_fields_set and getattr(self, "adam_w_mode", True):
            return self.model_copy(update={"weight_decay": 0.01})
        return self


class AdamParams(AdamWParams):
    """Parameters of Adam in a file."""

    adam_w_mode: bool = True
    """true: weight decay is decoupled, and the type becomes AdamW. false: L2 decay, as in torch.optim.Adam."""


class AdamWFileParams(AdamWParams):
    """Parameters of AdamW in a file."""

    adam_w_mode: Annotated[bool, AUTO, Field(exclude=True)] = True
    """Must be true, as the type says. DeepSpeed's files write it."""

    @model_validator(mode="after")
    def _check_decoupled(self) -> AdamWFileParams:
        # DeepSpeed's own files write the key even for AdamW, so true is accepted and left out again.
        if not self.adam_w_mode:
            raise ValueError(
                "adam_w_mode is false, but the type AdamW always decouples weight decay, in DeepSpeed as well; leave "
                'adam_w_mode out, or write "type": "Adam" for L2'
            )
        return self


class SGDParams(Section):
    """Parameters of SGD."""

    lr: Annotated[NonNegative, AUTO] = 1e-3
    """Learning rate."""
    momentum: Annotated[Decay, AUTO] = 0.0
    """Momentum factor."""
    dampening: Annotated[Annotated[float, Ge(-MAX_FLOAT), Le(MAX_FLOAT)], AUTO] = 0.0
    """Dampening for momentum."""
    weight_decay: Annotated[NonNegative, AUTO] = 0.0
    """L2 weight decay."""
    nesterov: bool = False
    """Use Nesterov momentum, which needs a momentum above 0 and no dampening."""

    @model_validator(mode="after")
    def _check_nesterov(self) -> SGDParams:
        # torch would raise the same error, but only once the model has been built.
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError('nesterov needs momentum above 0 and dampening 0; write for example "momentum": 0.9')
        return self


class AdamWConfig(Section):
    """An `optimizer` section of type "AdamW"."""

    type: Literal["AdamW", "AdamW8bit"]
    """Adam with decoupled weight decay. AdamW8bit: with "optimizer_state_dtype": "int8"."""
    params: Annotated[dict[str, Any], CheckedBy(AdamWFileParams)] = AdamWParams().model_dump()
    """Its hyperparameters."""


class AdamConfig(Section):
    """An `optimizer` section of type "Adam"."""

    type: Literal["Adam", "Adam8bit"]
    """Adam. As in DeepSpeed, weight decay is decoupled unless adam_w_mode is false. Adam8bit: with
    "optimizer_state_dtype": "int8"."""
    params: Annotated[dict[str, Any], CheckedBy(AdamParams)] = AdamParams().model_dump()
    """Its hyperparameters."""

    @model_validator(mode="after")
    def _to_torch_type(self) -> Any:
        """Turn decoupled Adam into AdamW, and drop `adam_w_mode`, which torch's classes do not know."""
        # The key has done its work, and torch's classes would refuse it as an unknown argument.
        params = {name: value for name, value in self.params.items() if name != "adam_w_mode"}
        if self.params.get("adam_w_mode", False):
            return AdamWConfig(type="AdamW" if self.type == "Adam" else "AdamW8bit", params=params)
        return self.model_copy(update={"params": params})

    @field_serializer("params")
    def _with_adam_w_mode(self, params: dict[str, Any]) -> dict[str, Any]:
        # Without the key a loader would take this section for decoupled Adam again.
        return {**params, "adam_w_mode": False}


class SGDConfig(Section):
    """An `optimizer` section of type "SGD"."""

    type: Literal["SGD"]
    """Stochastic gradient descent, with optional momentum."""
    params: Annotated[dict[str, Any], CheckedBy(SGDParams)] = SGDParams().model_dump()
    """Its hyperparameters."""


class AdagradParams(Section):
    """Parameters of Adagrad."""

    lr: Annotated[NonNegative, AUTO] = 1e-2
    """Learning rate."""
    lr_decay: Annotated[NonNegative, AUTO] = 0.0
    """Decay of the learning rate."""
    weight_decay: Annotated[NonNegative, AUTO] = 0.0
    """L2 weight decay."""
    initial_accumulator_value: Annotated[NonNegative, AUTO] = 0.0
    """Initial value of the sum of squares."""
    eps: Annotated[NonNegative, AUTO] = 1e-10
    """Added to the root of the sum of squares."""


class AdagradConfig(Section):
    """An `optimizer` section of type "Adagrad"."""

    type: Literal["Adagrad"]
    """Rates fall with the sum of the squared gradients so far (Duchi et al., JMLR 2011)."""
    params: Annotated[dict[str, Any], CheckedBy(AdagradParams)] = AdagradParams().model_dump()
    """Its hyperparameters."""


class LionParams(Section):
    """Parameters of Lion."""

    lr: Annotated[NonNegative, AUTO] = 1e-4
    """Learning rate. A tenth to a third of AdamW's is usual."""
    betas: Annotated[Betas, AUTO] = (0.9, 0.99)
    """Decay rates of the update's direction and of the momentum."""
    weight_decay: Annotated[NonNegative, AUTO] = 0.0
    """Decoupled weight decay. Three to ten times AdamW's is usual."""


class LionConfig(Section):
    """An `optimizer` section of type "Lion"."""

    type: Literal["Lion", "Lion8bit"]
    """Updates by the sign of a momentum (arXiv 2302.06675), with half of Adam's state. Lion8bit: with
    "optimizer_state_dtype": "int8"."""
    params: Annotated[dict[str, Any], CheckedBy(LionParams)] = LionParams().model_dump()
    """Its hyperparameters."""


class MuonParams(Section):
    """Parameters of Muon, and of AdamW for what is no hidden matrix."""

    lr: Annotated[NonNegative | None, AUTO] = None
    """Learning rate of both, unless the next two keys say otherwise. null: 0.02 for Muon and 3e-4 for AdamW."""
    muon_lr: Annotated[NonNegative | None, AUTO] = None
    """Learning rate of Muon; null: lr."""
    adam_lr: Annotated[NonNegative | None, AUTO] = None
    """Learning rate of AdamW; null: lr."""
    momentum: Annotated[Decay, AUTO] = 0.95
    """Momentum factor of Muon."""
    nesterov: bool = True
    """Look ahead of the momentum."""
    weight_decay: Annotated[NonNegative, AUTO] = 0.0
    """Decoupled weight decay of both."""
    ns_steps: Annotated[int, Ge(1), Le(99)] = 5
    """Iterations that make a matrix orthogonal (Newton-Schulz)."""
    ns_coefficients: Annotated[tuple[float, float, float], Strict(False)] = (3.4445, -4.775, 2.0315)
    """Coefficients of the iteration."""
    ns_eps: NonNegative = 1e-7
    """Smallest norm that a matrix is divided by."""
    ns_dtype: Literal["bf16", "fp32"] = "bf16"
    """What the iteration computes in: bf16 as in torch.optim.Muon, or fp32."""
    ns_method: Literal["standard", "gram"] = "standard"
    """How the iteration is computed: "gram" is the same polynomial in fewer products, where a matrix is longer than
    1.5 times its width. It rounds otherwise. DeepSpeed's default is "gram"."""
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None = None
    """How the rate depends on a matrix's rows A and columns B. null or "original": sqrt(max(1, A / B));
    "match_rms_adamw": 0.2 sqrt(max(A, B)), with which AdamW's rates and decay serve (arXiv 2502.16982);
    "spectral_unclamped": sqrt(A / B)."""
    muon_params: list[str] | None = None
    """Patterns of names (fnmatch) of the parameters that Muon updates. null: parameters of two or more dimensions
    that are no embedding and no head. An attribute use_muon (True or False) of a parameter decides before both."""
    matrices: dict[str, Annotated[int, Ge(1)]] = Field(default_factory=dict)
    """By patterns of names, how many matrices a parameter holds, which are equal blocks of its rows: 3 for a fused
    projection of queries, keys and values, or the number of heads. Each is made orthogonal by itself. Of two patterns
    that match a name the later one counts."""
    per_head_muon: bool = False
    """Make each head of q_proj, k_proj and v_proj (query, key and value, wq, wk and wv) orthogonal by itself, as
    model.config has the numbers of heads. `matrices` decides before it."""
    betas: Annotated[Betas, AUTO] = (0.9, 0.95)
    """Decay rates of AdamW's moments. The default is DeepSpeed's for Muon."""
    eps: Annotated[NonNegative, AUTO] = 1e-10
    """Added to the root of AdamW's second moment. The default is DeepSpeed's for Muon."""
    adam_w_mode: bool = True
    """false: Adam with L2 decay in the place of AdamW."""
    torch_adam: TorchAdam = False
    """Take torch's AdamW or Adam, which changes nothing."""


class MuonConfig(Section):
    """An `optimizer` section of type "Muon"."""

    type: Literal["Muon"]
    """Muon for hidden matrices (kellerjordan.github.io/posts/muon), and AdamW for all other parameters."""
    params: Annotated[dict[str, Any], CheckedBy(MuonParams)] = MuonParams().model_dump()
    """The hyperparameters of both."""


class ImportedOptimizerConfig(Section):
    """An `optimizer` section that names a class by its import path."""

    type: Annotated[str, Field(pattern=f"^{IMPORT_PATH}$")]
    """Import path of a torch.optim.Optimizer class, such as "torch.optim.RAdam" or "mypackage.optim.MyOptimizer"."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class. An argument that is "auto" is left out."""

    @field_validator("params")
    @classmethod
    def _check_json(cls, params: dict[str, Any]) -> dict[str, Any]:
        try:
            # The configuration is compared between ranks and stored in checkpoints as JSON.
            json.dumps(params, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"not JSON ({error}); for other arguments pass the optimizer to initialize(optimizer=...)"
            ) from None
        return {name: value for name, value in params.items() if value != "auto"}


def is_import_path(kind: Any) -> bool:
    """Tell whether an optimizer's `type` is the import path of a class."""
    return isinstance(kind, str) and re.fullmatch(IMPORT_PATH, kind) is not None


def _discriminate(value: Any) -> str | None:
    # The value may be a dict from a file or a section that was checked before.
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return IMPORTED_TAG if is_import_path(kind) else None if kind is None else EIGHT_BIT_TYPES.get(str(kind), str(kind))


OptimizerConfig = Annotated[
    Annotated[AdamConfig, Tag("Adam")]
    | Annotated[AdamWConfig, Tag("AdamW")]
    | Annotated[SGDConfig, Tag("SGD")]
    | Annotated[AdagradConfig, Tag("Adagrad")]
    | Annotated[LionConfig, Tag("Lion")]
    | Annotated[MuonConfig, Tag("Muon")]
    | Annotated[ImportedOptimizerConfig, Tag(IMPORTED_TAG)],
    Discriminator(_discriminate),
]
OPTIMIZER_TYPES = ("Adam", "Adam8bit", "AdamW", "AdamW8bit", "SGD", "Adagrad", "Lion", "Lion8bit", "Muon")
# DeepSpeed's other optimizers, and why none of them is available.
_ABSENT = "torch has no LAMB; a class of another package runs at every stage by its import path"
_COMPRESSED = "it compresses its communication, which changes results"
UNAVAILABLE_TYPES = {"Lamb": _ABSENT, **dict.fromkeys(("OneBitAdam", "OneBitLamb", "ZeroOneAdam"), _COMPRESSED)}
