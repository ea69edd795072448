"""The sections of tensor and expert parallelism: over how many ranks layers and experts are split."""

from __future__ import annotations

from typing import Annotated

from pydantic import model_validator

from zeroengine.config.fields import AUTO, Count, Section


class TensorParallel(Section):
    """Layers that are split over ranks, which compute each sample together."""

    autotp_size: Annotated[Count, AUTO] = 0
    """Number of ranks that hold one model together, each of them a slice of every layer that the model's own plan
    splits (`base_model_tp_plan` of transformers). States are partitioned over the ranks with the same slices. 0 and 1:
    no layer is split here; a model that is split already needs no number."""


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
