"""The squared norm: clipping's measure and, where it is not finite, the overflow test."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from zeroengine.errors import ZeroEngineError
from zeroengine.ops import _fallback
from zeroengine.ops._library import DTYPE_CODES, library


def squared_norm(x: Tensor) -> Tensor:
    """The sum of the squares of `x`, accumulated in float64 in an order that no number of threads changes.

    It is finite exactly if every element of `x` is: squares of finite float32 cannot overflow a float64.

    Args:
        x: float32, bfloat16 or float16, contiguous.

    Returns:
        A 0-d float64 tensor on x's device.

    Raises:
        ZeroEngineError: another dtype, or not contiguous.
    """
    if x.dtype not in DTYPE_CODES or not x.is_contiguous():
        raise ZeroEngineError(
            f"squared_norm: got {x.dtype} with shape {tuple(x.shape)} and strides {x.stride()}; "
            f"pass a contiguous tensor of {', '.join(map(str, DTYPE_CODES))}"
        )
    return (_squared_norm_op if torch.compiler.is_compiling() else _squared_norm)(x)


def _squared_norm(x: Tensor) -> Tensor:
    handle = library() if x.device.type == "cpu" else None
    if handle is None:
        return _fallback.squared_norm(x.view(-1))
    result = ctypes.c_double()
    if handle.ze_squared_norm(
        x.data_ptr(), DTYPE_CODES[x.dtype], x.numel(), ctypes.byref(result), torch.get_num_threads()
    ):
        raise MemoryError("squared_norm: no memory for its partial sums")
    return torch.tensor(result.value, dtype=torch.float64)


_squared_norm_op = torch.library.custom_op("zeroengine::squared_norm", _squared_norm, mutates_args=())


@_squared_norm_op.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float64)
