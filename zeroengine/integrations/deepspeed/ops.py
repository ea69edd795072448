"""``deepspeed.ops``: DeepSpeed's optimizers as torch's, which the engine runs on its fused update."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.optim.caller_optimizer import add_param_group
from zeroengine.optim.lion import Lion


class FusedAdam(torch.optim.Adam):
    """Adam, with decoupled weight decay unless ``adam_w_mode`` is False.

    Args:
        params: Parameters or groups.
        lr: The learning rate.
        bias_correction: Must be True.
        betas: The decay rates of the moments.
        eps: Added to the root of the second moment.
        adam_w_mode: Whether weight decay is decoupled.
        weight_decay: The weight decay.
        amsgrad: Must be False.
        set_grad_none: Not used.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction or amsgrad:
            raise ZeroEngineError(f"{type(self).__name__}: write bias_correction=True and amsgrad=False")
        super().__init__(
            params,
            lr=lr,
            betas=tuple(betas),  # type: ignore[arg-type]
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adam_w_mode,
        )

    # torch's own imports its compiler, which takes 70 MB and a second.
    add_param_group = add_param_group


class DeepSpeedCPUAdam(FusedAdam):
    """Adam. Where its states live is "offload_optimizer" of the configuration.

    Args:
        model_params: Parameters or groups.
        lr: The learning rate.
        bias_correction: Must be True.
        betas: The decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: The weight decay.
        amsgrad: Must be False.
        adamw_mode: Whether weight decay is decoupled.
        fp32_optimizer_states: False: "optimizer_state_dtype" is "bf16" where the configuration does not name it.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


class FusedLion(Lion):
    """Lion."""

    def __init__(self, params: Any, *args: Any, set_grad_none: bool = True, **options: Any) -> None:
        super().__init__(params, *args, **options)


class DeepSpeedCPULion(FusedLion):
    """Lion."""


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad."""

    def __init__(
        self, model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, amsgrad: bool = False
    ) -> None:
        if amsgrad:
            raise ZeroEngineError("DeepSpeedCPUAdagrad: write amsgrad=False")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class OpBuilder:
    """Stands for one of DeepSpeed's kernels. zeroengine's own are compiled when it is installed."""

    NAME: ClassVar[str] = "op"
    SERVED: ClassVar[bool] = False

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether zeroengine does what this kernel does."""
        return self.SERVED

    def load(self, verbose: bool = True) -> Any:
        """Raise: there is no kernel of DeepSpeed's to load."""
        raise ZeroEngineError(
            f"{type(self).__name__}.load(): zeroengine has none of DeepSpeed's kernels. Use torch.optim's optimizers "
            "and the configuration's offload, which run on its own."
        )

    jit_load = builder = load


# The kernels by the names of their builders: those that zeroengine has of its own, and those that it does not need.
_SERVED = "AsyncIO:async_io CPUAdagrad:cpu_adagrad CPUAdam:cpu_adam CPULion:cpu_lion FusedAdam:fused_adam "
_SERVED += "FusedLion:fused_lion"
_NOT_SERVED = (
    "EvoformerAttn:evoformer_attn FPQuantizer:fp_quantizer FusedLamb:fused_lamb GDS:gds Quantizer:quantizer "
    "Inference:transformer_inference RandomLTD:random_ltd SpatialInference:spatial_inference Transformer:transformer "
    "StochasticTransformer:stochastic_transformer Utils:utils"
)
BUILDERS: dict[str, type[OpBuilder]] = {
    f"{builder}Builder": type(f"{builder}Builder", (OpBuilder,), {"NAME": name, "SERVED": is_served})
    for names, is_served in ((_SERVED, True), (_NOT_SERVED, False))
    for builder, name in (pair.split(":") for pair in names.split())
}
# Whether zeroengine does what each kernel of DeepSpeed does.
__compatible_ops__ = {builder.NAME: builder.SERVED for builder in BUILDERS.values()}
