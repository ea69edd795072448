"""Choose the backend that updates as the caller's optimizer does, before anything is partitioned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroengine import ops
from zeroengine.config import FLOATS, Config
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.placement import Placement
from zeroengine.optim.backends.adam_state import has_adam_rule
from zeroengine.optim.backends.async_adam import AsyncAdam
from zeroengine.optim.backends.blocking_adam import BlockingAdam
from zeroengine.optim.backends.interface import UpdateBackend
from zeroengine.optim.backends.torch_optimizer import TorchOptimizer
from zeroengine.partition.cut import UnitPlan


def choose_backend(
    optimizer: torch.optim.Optimizer,
    plans: Sequence[UnitPlan],
    placement: Placement,
    config: Config,
    device: torch.device,
    async_step: bool | None,
) -> type[UpdateBackend]:
    """Return the class of the backend that updates the states of ``plans`` where ``placement`` has them.

    Args:
        optimizer: The caller's optimizer, whose class says how to update.
        plans: The units.
        placement: Where their states are.
        config: The resolved configuration.
        device: The device that the model computes on.
        async_step: Whether to choose ``AsyncAdam`` where it can run. None: on a GPU that zeroengine's kernels serve.

    Raises:
        ZeroEngineError: The backend cannot keep states in bf16, or not outside the device's memory.
    """
    trainable = [pair for pair in zip(plans, placement.parameter_shards, strict=True) if pair[0].trainable]
    on_device = all(store is None for store in (*placement.optimizer_stores, *(stored for _, stored in trainable)))
    master_dtypes = {torch.float32 if plan.is_mixed_precision else plan.dtype for plan, _ in trainable}
    if has_adam_rule(optimizer) and master_dtypes <= {torch.float32}:
        if trainable and on_device and (ops.cuda_library(device) is not None if async_step is None else async_step):
            return AsyncAdam
        return BlockingAdam
    name = type(optimizer).__name__
    if FLOATS[config.optimizer_state_dtype] is not torch.float32:
        raise ZeroEngineError(
            f"optimizer_state_dtype: only Adam and AdamW on fp32 masters keep moments in bf16, not {name}; remove "
            "the key"
        )
    if not on_device:
        raise ZeroEngineError(
            f"offload: only Adam and AdamW on fp32 masters update states that are not on the device, not {name}; write "
            '"device": "none"'
        )
    # ``check_optimizer`` refuses optimizers that cannot run on shards.
    return TorchOptimizer
