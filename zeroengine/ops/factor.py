"""The factor by which the update multiplies the gradient, from the gradient's squared norm and on its device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeroengine.ops import _cuda_library


def gradient_factor(
    squared_norm: Tensor,
    *,
    divisor: float = 1.0,
    weight: Tensor | None = None,
    limit: float = 0.0,
    skip: bool = True,
) -> Tensor:
    """Unscale, clip and test for overflow on the norm's device. With the CUDA library the host does not wait.

    Args:
        squared_norm: The squared norm of the summed gradient, before any division. 0-d float64.
        divisor: Divides the gradient: the number of summed ranks and micro-steps, times the loss scale.
        weight: Divides the gradient as well, 0-d float64 on the same device; None: nothing does. Where it is 0 the
            factor and the norm are 0, and the third value is 1.
        limit: The largest norm, as in `torch.nn.utils.clip_grad_norm_`; 0 for no clipping.
        skip: Whether a norm that is not finite is an overflow.

    Returns:
        Three float64 values on the same device: the factor of the gradient, the norm of the divided gradient before
        clipping, and 1 on overflow or without weight, else 0.
    """
    assert squared_norm.dtype is torch.float64 and not squared_norm.dim(), (squared_norm.dtype, squared_norm.shape)
    device = squared_norm.device
    if (cuda := _cuda_library.cuda_library(device)) is not None:
        result = torch.empty(3, dtype=torch.float64, device=device)
        on_device = None if weight is None else weight.data_ptr()
        arguments = (squared_norm.data_ptr(), on_device, divisor, limit, skip, result.data_ptr())
        _cuda_library.call(cuda, "ze_cuda_gradient_factor", device, *arguments)
        return result
    # Python computes this, because torch's square root may be off by a bit. Without the library this waits for the GPU.
    total = squared_norm.item()
    divisor = divisor if weight is None else divisor * weight.item()
    if not divisor:
        return torch.tensor((0.0, 0.0, 1.0), dtype=torch.float64, device=device)
    grad_norm = math.sqrt(total) / divisor
    # ``clip_grad_norm_`` adds the same 1e-6.
    clip = limit / (grad_norm + 1e-6) if limit > 0 else 1.0
    values = ((1.0 if clip > 1 else clip) / divisor, grad_norm, float(skip and not math.isfinite(total)))
    return torch.tensor(values, dtype=torch.float64, device=device)
