"""The sections of precision: the dtypes of parameters, computation, accumulation and buffers, and the loss scale."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator

from zeroengine.config.fields import AUTO, AboveZero, Auto, Between, NonNegative, Positive, Section

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of the optimizer's moments. Those of 8 bits are kept in bytes.
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
_LONG_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
SPELLINGS = {f"{prefix}{long}": name for long, name in _LONG_NAMES.items() for prefix in ("", "torch.")}


def _spelled(*names: str) -> BeforeValidator:
    """Return a validator that also accepts DeepSpeed's longer spellings of these dtypes."""
    # DeepSpeed accepts several names of one dtype, and only one of them is kept.
    spellings: Any = (*names, *(long for long, name in SPELLINGS.items() if name in names))
    return BeforeValidator(
        lambda value: SPELLINGS.get(value, value) if isinstance(value, str) else value,
        json_schema_input_type=Literal[spellings],
    )


FloatName = Annotated[Literal["fp32", "bf16", "fp16"], _spelled("fp32", "bf16", "fp16")]
LowName = Annotated[Literal["bf16", "fp16"], _spelled("bf16", "fp16")]


class BF16(Section):
    """bfloat16 mixed precision: compute and communicate in bf16, update fp32 master weights, or the parameters."""

    enabled: Annotated[bool | None, Auto(None)] = False
    """Train in bf16. "auto": true if the model's parameters are bf16 and no other precision is enabled."""
    bf16_master_weights_and_grads: bool = False
    """Update the bf16 parameters themselves, rounded stochastically, and accumulate gradients in bf16 unless
    `grad_accum_dtype` says otherwise. Without fp32 masters a parameter takes 4 bytes less."""


class FP16(Section):
    """float16 mixed precision: compute and communicate in fp16 with a scaled loss, update fp32 master weights."""

    enabled: Annotated[bool | None, Auto(None)] = False
    """Train in fp16. "auto": true if the model's parameters are fp16 and no other precision is enabled."""
    fp16_master_weights_and_grads: bool = False
    """Update the fp16 parameters themselves, and accumulate gradients in fp16 unless `grad_accum_dtype` says otherwise.
    Without fp32 masters a parameter takes 4 bytes less, and small updates are lost."""
    loss_scale: Annotated[NonNegative, AUTO] = 0.0
    """Static loss scale. 0: the scale is dynamic."""
    initial_scale_power: Annotated[int, Between(0, 126), AUTO] = 16
    """The dynamic scale starts at two to this power."""
    loss_scale_window: Annotated[Positive, AUTO] = 1000
    """Number of steps without overflow after which the next one doubles the scale."""
    hysteresis: Annotated[Positive, AUTO] = 2
    """The number of the first overflow that halves the scale; later ones halve it too. The count of overflows restarts
    when the scale doubles."""
    consecutive_hysteresis: bool = False
    """Restart the count of `hysteresis` at every step without overflow as well."""
    min_loss_scale: Annotated[AboveZero, AUTO] = 1.0
    """Smallest dynamic scale. An overflow at this scale is an error."""


class TorchAutocast(Section):
    """torch.autocast around the forward. Parameters, gradients and their reduction keep their own dtype."""

    enabled: Annotated[bool, AUTO] = False
    """Run the model under torch.autocast."""
    dtype: Annotated[LowName, AUTO] = "bf16"
    """Dtype that autocast computes in. With fp16 the loss is scaled as the `fp16` section says."""


class DataTypes(Section):
    """Dtypes beside those of parameters and computation."""

    grad_accum_dtype: Annotated[FloatName | None, AUTO] = None
    """Dtype that gradients accumulate in. "auto": the compute dtype if gradient_accumulation_steps is 1 or there are no
    fp32 masters, else fp32."""
    buffer_dtype: Annotated[FloatName | None, AUTO] = None
    """Dtype that floating-point buffers of the model are cast to. null: buffers keep their dtypes."""
