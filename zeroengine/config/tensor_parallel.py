"""The sections of tensor and expert parallelism: over how many ranks layers and experts are split."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import Field, field_validator, model_validator

from zeroengine.config.fields import AUTO, NULL, Count, OneOrTwo, Section
from zeroengine.config.source import describe


class LayerSpec(Section):
    """Layers of which DeepSpeed's AutoTP says how they are split."""

    patterns: Annotated[list[re.Pattern[str]], MinLen(1)]
    """Regular expressions of the names of weights, such as `".*\\.o_proj\\.weight$"`."""
    partition_type: Literal["column", "row", "skip"] = "column"
    """"column": split by what the layer returns. "row": by what it takes. "skip": not split."""
    gather_output: bool = False
    """Whether every rank gets all of what a "column" layer returns."""
    model_types: Annotated[list[str] | None, NULL] = None
    """The models, by the `model_type` of their configuration, that this is for. null: all."""
    partition_dim: Annotated[int | None, NULL] = None
    """The dimension of the weight, which follows from "column" (0) and "row" (1), and may be left out."""
    shape: None = None
    """null: fused matrices are not split. Split such a model before, by its own plan or by PyTorch."""
    grad_allreduce: Literal[False] = False
    """false: the model sums parts of gradients, as by `param.register_post_accumulate_grad_hook`."""

    @field_validator("shape", "grad_allreduce", mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if value:
            raise ValueError(f"found {describe(value)}, which is not honored; write a plan of zeroengine.parallelize")
        return value

    @model_validator(mode="after")
    def _check_dim(self) -> LayerSpec:
        if self.partition_dim not in (None, {"column": 0, "row": 1}.get(self.partition_type)):
            raise ValueError(f'partition_dim {self.partition_dim} contradicts "{self.partition_type}"; leave it out')
        return self


class PartitionConfig(Section):
    """Which layers are split, in the words of DeepSpeed's AutoTP."""

    layer_specs: list[LayerSpec] = Field(default=[])
    """Layers, and how they are split. The first entry that matches a weight decides; what none matches stays whole.
    Without an entry the model's own plan counts."""
    lm_head_patterns: list[str] = Field(default=["lm_head", "embed_out"])
    """Names of output embeddings, which take whole inputs also as "row"."""


class TensorParallel(Section):
    """Layers that are split over ranks, which compute each sample together."""

    autotp_size: Annotated[Count, AUTO] = 0
    """Number of ranks that hold one model together, each of them a slice of every layer that the model's own plan
    splits (`base_model_tp_plan` of transformers), or `partition_config`. States are partitioned over the ranks with the
    same slices. 0 and 1: no layer is split here; a model that is split already needs no number."""
    partition_config: Annotated[PartitionConfig, NULL] = PartitionConfig()
    """The layers that `autotp_size` splits, for a model without a plan of its own, or instead of it."""
    slices: Annotated[dict[str, OneOrTwo], NULL] = Field(default_factory=dict)
    """With `initialize(mpu=...)`: the parameters that are slices, by patterns of their names (`fnmatch`), and the
    dimension along which each is cut, such as `{"*.up.weight": 0, "*.down.weight": 1}`. The last pattern that matches
    counts. `[0, 2]`: of a fused matrix, whose 2 parts are cut one by one. Marks of Megatron need no pattern."""


class ExpertParallel(Section):
    """Experts that are split over ranks, to which the tokens are sent."""

    enabled: Annotated[bool, AUTO] = False
    """Whether experts are split."""
    autoep_size: Annotated[Count, AUTO] = 0
    """Number of ranks that hold all experts together, by the model's own plan (`base_model_ep_plan` of transformers).
    States of experts are partitioned over the ranks with the same experts. A multiple of `autotp_size`."""

    @model_validator(mode="after")
    def _check_both(self) -> ExpertParallel:
        if self.enabled and not self.autoep_size:
            raise ValueError('enabled without a number of ranks; write "autoep_size": 4, or "enabled": false')
        if self.autoep_size > 1 and "enabled" not in self.model_fields_set:
            raise ValueError('autoep_size counts where it is enabled; write "enabled": true beside it')
        return self

    @property
    def size(self) -> int:
        """The number of ranks; 1 if experts are not split."""
        return max(self.autoep_size, 1) if self.enabled else 1
