"""Adam and AdamW over flat buffers, in one pass."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from zeroengine.errors import ZeroEngineError
from zeroengine.ops import _fallback
from zeroengine.ops._library import DTYPE_CODES, AdamArgs, library


def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    grad_scale: float = 1.0,
    maximize: bool = False,
    low_precision: Tensor | None = None,
) -> None:
    """One step of Adam (arXiv 1412.6980, algorithm 1) or AdamW (1711.05101), in place, in one pass over memory.

    An element's result depends on that element alone: a buffer updated at once, in pieces, or on any number of
    threads gets the same bits.

    Args:
        param, exp_avg, exp_avg_sq: float32, 1-D, contiguous, equally long; updated in place.
        grad: float32, bfloat16 or float16, as long; not changed.
        step: the step's number, counted from 1.
        lr, beta1, beta2, eps, weight_decay: as in `torch.optim.AdamW`.
        decoupled: True for AdamW's weight decay, False for Adam's, which is added to the gradient (L2).
        grad_scale: multiplies the gradient first. It carries 1/world, 1/loss-scale and the clip factor.
        maximize: ascend instead.
        low_precision: bfloat16 or float16, as long; receives the updated param, rounded to nearest even.

    Raises:
        ZeroEngineError: a tensor of another shape, dtype, device or stride, or a step below 1.
    """
    _check(step, param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, low_precision=low_precision)
    # The custom op costs more than a small update does, so it serves tracing alone.
    run = _adam_step_op if torch.compiler.is_compiling() else _adam_step
    run(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        low_precision,
        step,
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled,
        grad_scale,
        maximize,
    )


def _adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low_precision: Tensor | None,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    grad_scale: float,
    maximize: bool,
) -> None:
    args = AdamArgs(lr, beta1, beta2, eps, weight_decay, grad_scale, step, decoupled, maximize)
    handle = library() if param.device.type == "cpu" else None
    if handle is None:
        return _fallback.adam_step(param, grad, exp_avg, exp_avg_sq, low_precision, args)
    handle.ze_adam(
        param.data_ptr(),
        grad.data_ptr(),
        DTYPE_CODES[grad.dtype],
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        None if low_precision is None else low_precision.data_ptr(),
        0 if low_precision is None else DTYPE_CODES[low_precision.dtype],
        param.numel(),
        ctypes.byref(args),
        torch.get_num_threads(),
    )


_adam_step_op = torch.library.custom_op(
    "zeroengine::adam_step", _adam_step, mutates_args=("param", "exp_avg", "exp_avg_sq", "low_precision")
)


@_adam_step_op.register_fake
def _(*args: object) -> None:
    """Nothing is returned."""


def _check(step: int, **tensors: Tensor | None) -> None:
    param = tensors["param"]
    assert param is not None
    for name, x in tensors.items():
        if x is None:
            continue
        if x.dtype not in _DTYPES[name]:
            wanted = " or ".join(map(str, _DTYPES[name]))
            raise ZeroEngineError(f"adam_step: {name} has dtype {x.dtype}; it must be {wanted}")
        if x.dim() != 1 or not x.is_contiguous():
            raise ZeroEngineError(
                f"adam_step: {name} has shape {tuple(x.shape)} and strides {x.stride()}; pass a 1-D contiguous tensor"
            )
        if x.numel() != param.numel() or x.device != param.device:
            raise ZeroEngineError(
                f"adam_step: {name} has {x.numel()} elements on {x.device}, but param has {param.numel()} "
                f"on {param.device}; pass tensors of one length on one device"
            )
    if step < 1:
        raise ZeroEngineError(f"adam_step: step is {step}; count steps from 1")


_DTYPES = {
    "param": (torch.float32,),
    "grad": tuple(DTYPE_CODES),
    "exp_avg": (torch.float32,),
    "exp_avg_sq": (torch.float32,),
    "low_precision": (torch.bfloat16, torch.float16),
}
