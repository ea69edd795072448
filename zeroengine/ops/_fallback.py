"""The same operations on torch's own kernels: for other devices than the CPU, and where no compiler was found."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeroengine.ops._library import AdamArgs

_CHUNK = 1 << 24  # elements in a temporary
_SERIAL = 1 << 15  # torch sums so many on one thread, in a fixed order
_VECTOR = 64  # no vector of torch's CPU kernels is longer; it rounds the rest of a tensor differently


def adam_step(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, low_precision: Tensor | None, args: AdamArgs
) -> None:
    """`zeroengine.ops.adam_step` by torch's fused kernel."""
    for begin in range(0, param.numel(), _CHUNK):
        chunk = slice(begin, begin + _CHUNK)
        arrays = [param[chunk], grad[chunk].float() * args.grad_scale, exp_avg[chunk], exp_avg_sq[chunk]]
        numel = arrays[0].numel()
        rest = numel % _VECTOR if param.device.type == "cpu" else 0
        if rest < numel:
            _fused([x[: numel - rest] for x in arrays], args)
        if rest:
            padded = [pad(x[numel - rest :], (0, _VECTOR - rest)) for x in arrays]
            _fused(padded, args)
            for x, y in zip(arrays, padded, strict=True):
                x[numel - rest :] = y[:rest]
    if low_precision is not None:
        low_precision.copy_(param)


def _fused(arrays: list[Tensor], args: AdamArgs) -> None:
    param, grad, exp_avg, exp_avg_sq = arrays
    kernel = torch._fused_adamw_ if args.decoupled else torch._fused_adam_
    kernel(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.full((), float(args.step), device=param.device)],
        lr=args.lr,
        beta1=args.beta1,
        beta2=args.beta2,
        weight_decay=args.weight_decay,
        eps=args.eps,
        amsgrad=False,
        maximize=bool(args.maximize),
    )


def squared_norm(x: Tensor) -> Tensor:
    """`zeroengine.ops.squared_norm` by torch, a bounded piece in float64 at a time."""
    pieces = x.split(_SERIAL if x.device.type == "cpu" else _CHUNK)
    return torch.stack([piece.double().square_().sum() for piece in pieces]).sum()
