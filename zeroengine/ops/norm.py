"""The squared norm of gradients, for clipping and for the overflow test."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroengine.errors import ZeroEngineError
from zeroengine.ops import _cuda_library, _fallback
from zeroengine.ops._cuda_library import CudaArray
from zeroengine.ops._library import DTYPE_CODES, library


def squared_norm(x: Tensor) -> Tensor:
    """Return the sum of the squares of `x`, in float64 and in an order that does not depend on the number of threads.

    It is finite exactly if every element of `x` is: squares of finite float32 cannot overflow a float64.

    Args:
        x: float32, bfloat16 or float16, contiguous.

    Returns:
        A 0-d float64 tensor on x's device.

    Raises:
        ZeroEngineError: `x` has another dtype, or is not contiguous.
    """
    return squared_norms([x])


def squared_norms(tensors: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """Return the sum of `squared_norm` over several tensors of one device. On CUDA this does not wait.

    Args:
        tensors: As `squared_norm` takes them, all on one device.
        device: The device of the result if there are no tensors.

    Returns:
        A 0-d float64 tensor on their device.

    Raises:
        ZeroEngineError: As `squared_norm`, or the tensors are on different devices.
    """
    for x in tensors:
        if x.dtype not in DTYPE_CODES or not x.is_contiguous():
            raise ZeroEngineError(
                f"squared norm: got {x.dtype} with shape {tuple(x.shape)} and strides {x.stride()}; "
                f"pass a contiguous tensor of {', '.join(map(str, DTYPE_CODES))}"
            )
        if x.device != tensors[0].device:
            raise ZeroEngineError(
                f"squared_norms: tensors are on {tensors[0].device} and on {x.device}; pass those of one device"
            )
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    if (cuda := _cuda_library.cuda_library(tensors[0].device)) is not None:
        return _on_cuda(cuda, tensors)
    # The sum is in the order of the tensors, which fixes its bits.
    return sum(map(_without_cuda, tensors[1:]), _without_cuda(tensors[0]))


def _without_cuda(x: Tensor) -> Tensor:
    handle = library() if x.device.type == "cpu" else None
    if handle is None:
        return _fallback.squared_norm(x.view(-1))
    result = ctypes.c_double()
    # The number of threads changes no bit of the result.
    if handle.ze_squared_norm(
        x.data_ptr(), DTYPE_CODES[x.dtype], x.numel(), ctypes.byref(result), torch.get_num_threads()
    ):
        raise MemoryError("squared_norm: no memory for its partial sums")
    return torch.tensor(result.value, dtype=torch.float64, device="cpu")


def _on_cuda(handle: ctypes.CDLL, tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device
    arrays = (CudaArray * len(tensors))(*(CudaArray(x.data_ptr(), x.numel(), DTYPE_CODES[x.dtype]) for x in tensors))
    # The kernel sums in stages of a fixed shape, so the result does not depend on which block ends first.
    numel = handle.ze_cuda_squared_norm_workspace(arrays, len(tensors))
    # The partial sums of each stage. The caching allocator keeps them alive in stream order.
    workspace = torch.empty(numel, dtype=torch.float64, device=device)
    result = torch.empty((), dtype=torch.float64, device=device)
    _cuda_library.call(
        handle, "ze_cuda_squared_norm", device, arrays, len(tensors), workspace.data_ptr(), result.data_ptr()
    )
    return result
