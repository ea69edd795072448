"""Choose the backend that updates as the caller's optimizer does, before anything is partitioned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroengine.config import FLOATS, Config
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.placement import Placement
from zeroengine.optim.backends.async_adam import AsyncAdam
from zeroengine.optim.backends.blocking_adam import BlockingAdam
from zeroengine.optim.backends.interface import UpdateBackend, UpdateRequest
from zeroengine.optim.backends.torch_optimizer import TorchOptimizer
from zeroengine.partition.cut import UnitPlan

# The first backend that serves an optimizer runs it; the last one serves any.
BACKENDS: tuple[type[UpdateBackend], ...] = (AsyncAdam, BlockingAdam, TorchOptimizer)


def choose_backend(
    optimizer: torch.optim.Optimizer,
    plans: Sequence[UnitPlan],
    placement: Placement,
    config: Config,
    device: torch.device,
    async_step: bool | None,
) -> type[UpdateBackend]:
    """Return the class of the backend that updates the states of ``plans`` where ``placement`` has them.

    Raises:
        ZeroEngineError: The backend cannot keep states in bf16, or not outside the device's memory.
    """
    trainable = [pair for pair in zip(plans, placement.parameter_shards, strict=True) if pair[0].trainable]
    request = UpdateRequest(
        optimizer,
        frozenset(torch.float32 if plan.is_mixed_precision else plan.dtype for plan, _ in trainable),
        all(store is None for store in (*placement.optimizer_stores, *(stored for _, stored in trainable))),
        device,
        FLOATS[config.optimizer_state_dtype],
        async_step,
    )
    backend = next(backend for backend in BACKENDS if backend.serves(request))
    name = type(request.optimizer).__name__
    if request.moments_dtype is not torch.float32 and not backend.supports_bf16_moments:
        raise ZeroEngineError(
            f"optimizer_state_dtype: only Adam and AdamW on fp32 masters keep moments in bf16, not {name}; remove "
            "the key"
        )
    if not request.on_device and not backend.supports_offload:
        raise ZeroEngineError(
            f"offload: only Adam and AdamW on fp32 masters update states that are not on the device, not {name}; write "
            '"device": "none"'
        )
    return backend
