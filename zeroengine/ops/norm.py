"""The squared norm of gradients, for clipping and for the overflow test."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

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
    """
    return squared_norms([x])


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of `squared_norm` over several tensors of one device. On CUDA this does not wait.

    Args:
        tensors: At least one, as `squared_norm` takes them, all on one device.

    Returns:
        A 0-d float64 tensor on their device.
    """
    for x in tensors:
        assert x.dtype in DTYPE_CODES and x.is_contiguous(), (x.dtype, x.stride())
        assert x.device == tensors[0].device, (x.device, tensors[0].device)
    if (cuda := _cuda_library.cuda_library(tensors[0].device)) is not None:
        return _on_cuda(cuda, tensors)
    # Both sums are in the order of the tensors, which fixes their bits.
    handle = library() if tensors[0].device.type == "cpu" else None
    if handle is None:
        norms = [_fallback.squared_norm(x.view(-1)) for x in tensors]
        return sum(norms[1:], norms[0])
    total, result, num_threads = 0.0, ctypes.c_double(), torch.get_num_threads()
    for x in tensors:
        # The number of threads changes no bit of the result.
        if handle.ze_squared_norm(x.data_ptr(), DTYPE_CODES[x.dtype], x.numel(), ctypes.byref(result), num_threads):
            raise MemoryError("squared_norm: no memory for its partial sums")
        total += result.value
    return torch.tensor(total, dtype=torch.float64, device="cpu")


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
