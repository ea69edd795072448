"""Refuse parameters and buffers that have no plain memory, before anything is partitioned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroengine.comm.packing import is_quantizable
from zeroengine.config.zero import ZeroOptimization
from zeroengine.errors import ZeroEngineError
from zeroengine.partition.cut import UnitPlan


def check_tensor_kinds(model: nn.Module) -> None:
    """Check that the parameters and buffers of ``model`` have shapes, and plain memory that the ranks can exchange.

    Raises:
        ZeroEngineError: One is not initialized, sparse, quantized or a wrapper of other tensors, or torch cannot copy
            its dtype. The message names it, and what to do.
    """
    parameters = (("parameter", name, param) for name, param in model.named_parameters())
    buffers = (("buffer", name, buffer) for name, buffer in model.named_buffers())
    for kind, name, tensor in chain(parameters, buffers):
        if is_lazy(tensor):
            raise ZeroEngineError(
                f"{kind} {name} has no shape yet: its module is lazy and takes the shape in its first forward. Run one "
                "on a batch before initialize(), such as `with torch.no_grad(): model(*batch)`."
            )
        reason = _reason_refused(tensor)
        if reason:
            raise ZeroEngineError(f"{kind} {name} {reason}")


def check_quantizable(zero: ZeroOptimization, plans: Sequence[UnitPlan]) -> None:
    """Check that the parameters whose values or gradients are sent quantized have a dtype that can be.

    Args:
        zero: Decides what is quantized.
        plans: The units of the model.

    Raises:
        ZeroEngineError: A parameter has another dtype than fp32, bf16 or fp16.
    """
    for plan in plans:
        quantized = {
            "zero_quantized_weights": zero.zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights and not plan.trainable,
            "zero_quantized_gradients": zero.zero_quantized_gradients and plan.trainable,
        }
        keys = [key for key, is_set in quantized.items() if is_set]
        if not keys or is_quantizable(plan.dtype):
            continue
        name, param = plan.params[0]
        is_float = param.is_floating_point()
        change = "convert it, such as by model.float()" if is_float else "keep it as a buffer (register_buffer)"
        raise ZeroEngineError(
            f"parameter {name} is {str(param.dtype).removeprefix('torch.')}, and only fp32, bf16 and fp16 are "
            f"quantized; {change}, or leave {' and '.join(keys)} out"
        )


def _reason_refused(tensor: torch.Tensor) -> str:
    """Return why ``tensor`` is refused, and what to do; "" if it is not."""
    if is_traceable_wrapper_subclass(tensor):
        return (
            f"is a {type(tensor).__name__}, which wraps other tensors and has no memory of its own to partition or "
            "send. Keep the tensors that it wraps as parameters or buffers, and build it from them in the forward."
        )
    if tensor.layout is not torch.strided:
        return (
            f"has the layout {tensor.layout}: only dense tensors can be sent to the other ranks. Keep it dense "
            "(.to_dense()), keep its indices and values as two buffers, or keep it in a plain attribute of the module."
        )
    if tensor.is_quantized:
        return (
            f"is a quantized tensor ({tensor.dtype}), which torch cannot send to the other ranks. Keep its integers "
            "(.int_repr()) and its scale as two buffers, or dequantize it (.dequantize())."
        )
    try:
        torch.zeros(1, dtype=tensor.dtype, device="cpu").fill_(0).clone()
    except (RuntimeError, NotImplementedError):
        return (
            f"has the dtype {tensor.dtype}, which torch {torch.__version__} cannot copy. Keep its bytes as "
            "torch.uint8 (.view(torch.uint8)), and view them in its dtype where they are used."
        )
    return ""
