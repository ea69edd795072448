"""The section of ZeRO: what is partitioned over the ranks, and how its communication is divided and overlapped."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import ValidationError, model_validator

from zeroengine.config.degrees import DegreesSection
from zeroengine.config.fields import AUTO, NULL, Auto, Between, Count, Positive, Section
from zeroengine.config.offload import OffloadOptimizer, OffloadParam


class LoCo(Section):
    """Error feedback of quantized gradients (LoCo, arXiv 2407.04480). What packing a rank's gradients loses is kept, as
    bf16, and added to its next gradients."""

    err_beta: Annotated[float, Ge(0), Lt(1), AUTO] = 0.8
    """The part of the kept error that stays at each reduce; the rest comes from the latest error."""
    reset_T: Annotated[Positive, AUTO] = 1024
    """Number of reduces of a unit after which its error restarts from zero."""


class ZeroOptimization(Section):
    """What is partitioned over the ranks, and how its communication is divided and overlapped."""

    stage: Annotated[Annotated[int, Between(0, 3)] | Literal["auto"], Auto("auto", words=(), kept=("auto",))] = 0
    """0: nothing is partitioned. 1: the optimizer state. 2: gradients as well. 3: parameters as well. "auto": the
    lowest that fits into free memory; `initialize` says which."""
    degrees: Annotated[DegreesSection | None, NULL] = None
    """Hybrid sharding: the number of ranks that each state is partitioned over, in place of `stage`, which means all
    ranks. null: the stage decides."""
    reduce_bucket_size: Annotated[Positive | None, AUTO] = None
    """Units queue up to this many elements before they are reduced. "auto": as many elements as the largest unit."""
    overlap_comm: Annotated[bool, AUTO] = True
    """Communicate while computing."""
    prefetch_bucket_size: Annotated[Count, AUTO] = 50_000_000
    """Largest number of elements gathered ahead of their use; one unit may exceed it. 0: gather units when needed."""
    param_persistence_threshold: Annotated[Count, AUTO] = 100_000
    """Units with at most this many elements stay gathered at stage 3."""
    max_live_parameters: Annotated[Count, AUTO] = 1_000_000_000
    """Largest number of elements gathered at one time at stage 3. A unit in use and the next one always are."""
    zero_quantized_weights: Annotated[bool, AUTO] = False
    """Inexact: at stage 3, gather parameters for forward and backward as integers of 8 bits with a scale for every 256
    (ZeRO++ qwZ). All ranks compute with the rounded values. Masters, checkpoints and `gathered` stay exact."""
    zero_quantized_nontrainable_weights: Annotated[bool, AUTO] = False
    """Inexact: the same for frozen parameters alone. Their shards stay exact, so memory is not saved."""
    zero_quantized_gradients: Annotated[bool, AUTO] = False
    """Inexact: exchange gradients as integers of `quantized_gradient_bits` with a scale for every 256 (ZeRO++ qgZ), and
    add them in fp32."""
    quantized_gradient_bits: Annotated[Literal[8, 4], AUTO] = 8
    """Bits of each integer that zero_quantized_gradients sends. 4 sends half the bytes, and loses far more."""
    zeropp_loco_param: LoCo | None = None
    """Inexact: error feedback of quantized gradients. It takes 2 bytes for every parameter on every rank. null: what
    quantization loses is lost."""
    offload_optimizer: Annotated[OffloadOptimizer, NULL] = OffloadOptimizer()
    """Where the optimizer's states live."""
    offload_param: Annotated[OffloadParam, NULL] = OffloadParam()
    """Where the parameter shards live, at stage 3."""

    @model_validator(mode="before")
    @classmethod
    def _derive_stage(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "stage" in data or not isinstance(data.get("degrees"), dict | DegreesSection):
            return data
        try:
            degrees = DegreesSection.model_validate(data["degrees"])
        except ValidationError:
            # The section itself reports what is wrong.
            return data
        return {**data, "stage": degrees.stage}

    @model_validator(mode="after")
    def _check_agreement(self) -> ZeroOptimization:
        if self.degrees is not None and self.stage != self.degrees.stage:
            partitioned = ("nothing", "the optimizer's state", "gradients too", "parameters too")[self.degrees.stage]
            raise ValueError(
                f"degrees (or DeepSpeed's mics_shard_size and zero_hpz_partition_size) partition {partitioned}, which "
                f"is stage {self.degrees.stage}, and stage is {self.stage!r}; leave stage out, or write "
                f"{self.degrees.stage}"
            )
        if self.degrees is not None and self.degrees.has_second_copy and self.offload_param.device != "none":
            raise ValueError(
                "degrees.secondary_parameters keeps a copy of the parameters in the device's memory, and offload_param "
                "moves them away; leave one of them out"
            )
        if self.zeropp_loco_param is not None and not self.zero_quantized_gradients:
            raise ValueError(
                "zeropp_loco_param is the error feedback of quantized gradients, and they are not quantized; write "
                '"zero_quantized_gradients": true, or leave it out'
            )
        # Whole parameters are needed throughout at lower stages, so there is nothing to move away.
        # With "auto" the choice is left to `initialize`.
        if self.offload_param.device not in ("none", "auto") and self.stage not in (3, "auto"):
            raise ValueError(
                f"offload_param needs parameters that are released between uses, and stage {self.stage} keeps them "
                'whole; write "stage": 3, or offload the optimizer alone'
            )
        return self

    @property
    def gradient_bits(self) -> int | None:
        """The bits of each integer that gradients travel as; None where they travel exactly."""
        return self.quantized_gradient_bits if self.zero_quantized_gradients else None

    def quantizes_gathers(self, trainable: bool) -> bool:
        """Return whether the parameters of a unit, all trainable or all frozen, are gathered inexactly."""
        return self.zero_quantized_weights or (self.zero_quantized_nontrainable_weights and not trainable)

    @property
    def degree_numbers(self) -> dict[str, int] | None:
        """The numbers of `partition.degrees.Degrees`, or None where the stage decides. Needs `resolve`."""
        return None if self.degrees is None else self.degrees.numbers

    @property
    def unit_degree_numbers(self) -> list[tuple[str, dict[str, int]]]:
        """The numbers of `partition.degrees.Degrees` of the units whose names match a pattern. Needs `resolve`."""
        return [(pattern, degrees.numbers) for pattern, degrees in (self.degrees.by_pattern() if self.degrees else [])]
