"""Adam and AdamW over flat buffers, in one pass."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from zeroengine.ops import _cuda_library, _fallback
from zeroengine.ops._library import DTYPE_CODES, AdamArgs, library

# The dtypes that each array may have.
_DTYPES = {
    "param": (torch.float32,),
    "grad": tuple(DTYPE_CODES),
    "exp_avg": (torch.float32, torch.bfloat16),
    "exp_avg_sq": (torch.float32, torch.bfloat16),
    "low_precision_param": (torch.bfloat16, torch.float16),
}


class AdamArrays(NamedTuple):
    """The buffers of one update, as `adam_step` takes them."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    low_precision_param: Tensor | None

    def check(self) -> None:
        """Check that the tensors fit one another and the kernels, which take no more than addresses and a length."""
        for name, x in self._asdict().items():
            if x is not None:
                assert x.dtype in _DTYPES[name] and x.dim() == 1 and x.is_contiguous(), (name, x.dtype, x.stride())
                assert (x.numel(), x.device) == (self.param.numel(), self.param.device), (name, x.shape, x.device)
        assert self.exp_avg.dtype is self.exp_avg_sq.dtype

    def pointers(self) -> tuple[int | None, ...]:
        """Return the arrays as the C interfaces take them: addresses, and the codes of dtypes that vary."""
        param, grad, exp_avg, exp_avg_sq, low_precision_param = self
        moments = (exp_avg.data_ptr(), exp_avg_sq.data_ptr(), DTYPE_CODES[exp_avg.dtype])
        low: tuple[int | None, int] = (None, 0)
        if low_precision_param is not None:
            low = (low_precision_param.data_ptr(), DTYPE_CODES[low_precision_param.dtype])
        return (param.data_ptr(), grad.data_ptr(), DTYPE_CODES[grad.dtype], *moments, *low)


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
    low_precision_param: Tensor | None = None,
    reload_written: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """Take one step of Adam (arXiv 1412.6980, algorithm 1) or AdamW (1711.05101), in place, in one pass over memory.

    An element's result depends on that element alone: a buffer gets the same bits whether it is updated at once, in
    pieces, or on any number of threads.

    Everything is computed in float32. Moments in bfloat16 are rounded stochastically at the end, so that their expected
    values are the float32 ones. Rounding to nearest would lose increments below half a unit in the last place.

    Args:
        param: float32, 1-D, contiguous. Updated in place.
        grad: float32, bfloat16 or float16, as long. Not changed.
        exp_avg: The first moment: float32 or bfloat16, as long. Updated in place.
        exp_avg_sq: The second moment, in the dtype of the first. Updated in place.
        step: The step's number, counted from 1.
        lr, beta1, beta2, eps, weight_decay: As in `torch.optim.AdamW`.
        decoupled: True for AdamW's weight decay, False for Adam's, which is added to the gradient (L2).
        grad_scale: Multiplies the gradient first. It holds 1/world, 1/loss-scale and the clip factor.
        maximize: Whether to ascend.
        low_precision_param: bfloat16 or float16, as long. Receives the updated param, rounded to nearest even.
        reload_written: Whether to compare ``low_precision_param`` with the rounded param first. An element that differs
            was written from outside since the last step: param takes its value before the update. This reads 2 more
            bytes per element.
        seed: The seed of the random bits that round bfloat16 moments, 0 to 2**63 - 1. Pass a new one at each step.
        offset: The index of element 0 among those that share the seed, not negative. The bits are a pure function of
            seed and index, so a piece that begins at element i of a buffer takes offset i.
    """
    arrays = AdamArrays(param, grad, exp_avg, exp_avg_sq, low_precision_param)
    arrays.check()
    # The library takes seed and offset as 64-bit numbers, and adds an element's index to the offset.
    assert step >= 1 and 0 <= seed < 1 << 63 and 0 <= offset < 1 << 63, (step, seed, offset)
    reload_written = reload_written and low_precision_param is not None
    args = AdamArgs(
        lr, beta1, beta2, eps, weight_decay, grad_scale, step, seed, offset, decoupled, maximize, reload_written
    )
    device, numel = param.device, param.numel()
    if (cuda := _cuda_library.cuda_library(device)) is not None:
        _cuda_library.call(cuda, "ze_cuda_adam", device, *arrays.pointers(), numel, ctypes.byref(args))
    elif device.type == "cpu" and (cpu := library()) is not None:
        cpu.ze_adam(*arrays.pointers(), numel, ctypes.byref(args), torch.get_num_threads())
    else:
        _fallback.adam_step(*arrays, args)
