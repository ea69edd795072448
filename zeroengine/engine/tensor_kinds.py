"""Refuse parameters and buffers that have no plain memory, before anything is partitioned."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroengine.errors import ZeroEngineError


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
