"""The squared norm of gradients, for clipping and for the overflow test."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroengine.ops import _cuda_library, _fallback
from zeroengine.ops._library import DTYPE_CODES, Array, library
from zeroengine.utils.tensors import Addresses


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
    return SquaredNorms(tensors).sum()


class SquaredNorms:
    """The sum of `squared_norms` over the same tensors, for many times.

    Args:
        tensors: As `squared_norms` takes them. Their memory may change, as it does where a state is offloaded.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._addresses = tensors, Addresses(tensors)
        self._arrays = (Array * len(tensors))()

    def sum(self) -> Tensor:
        """Return the sum for the values that the tensors have now: a 0-d float64 tensor on their device."""
        device, count = self._tensors[0].device, len(self._tensors)
        if self._addresses.have_changed():
            for i, x in enumerate(self._tensors):
                assert x.dtype in DTYPE_CODES and x.is_contiguous(), (x.dtype, x.stride())
                assert x.device == device, (x.device, device)
                self._arrays[i] = Array(x.data_ptr(), x.numel(), DTYPE_CODES[x.dtype])
        if (cuda := _cuda_library.cuda_library(device)) is not None:
            # The kernel sums in stages of a fixed shape, so the result does not depend on which block ends first.
            numel = cuda.ze_cuda_squared_norm_workspace(self._arrays, count)
            # The partial sums of each stage. The caching allocator keeps them alive in stream order.
            workspace = torch.empty(numel, dtype=torch.float64, device=device)
            result = torch.empty((), dtype=torch.float64, device=device)
            pointers = workspace.data_ptr(), result.data_ptr()
            _cuda_library.call(cuda, "ze_cuda_squared_norm", device, self._arrays, count, *pointers)
            return result
        # The sum is in the order of the tensors, which fixes its bits.
        if device.type != "cpu" or (handle := library()) is None:
            norms = [_fallback.squared_norm(x.view(-1)) for x in self._tensors]
            return sum(norms[1:], norms[0])
        # The number of threads changes no bit of the result.
        total = ctypes.c_double()
        if handle.ze_squared_norm(self._arrays, count, ctypes.byref(total), torch.get_num_threads()):
            raise MemoryError("squared_norm: no memory for its partial sums")
        return torch.tensor(total.value, dtype=torch.float64, device="cpu")
