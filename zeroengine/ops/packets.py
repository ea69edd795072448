"""Pack tensors into integers of 8 or 4 bits with one scale per block, and add packets.

A block is 256 elements: one scale of 4 bytes for each block adds 1.6 % to integers of 8 bits. Smaller blocks would
follow outliers more closely and send more: blocks of 64 elements would add 6.3 %.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from zeroengine.errors import ZeroEngineError
from zeroengine.ops import _cuda_library, _packets_fallback
from zeroengine.ops._library import DTYPE_CODES, library
from zeroengine.ops._packets_fallback import packet_bytes

_QUANTIZE: list[Any] = [c_void_p, c_int, c_int64, c_int64, c_int, c_void_p, c_void_p, c_float]
_DEQUANTIZE: list[Any] = [c_void_p, c_int, c_int, c_int64, c_int64, c_int64, c_int, c_void_p]


def quantize(
    source: Tensor,
    packets: Tensor,
    *,
    bits: int,
    num_slices: int = 1,
    error: Tensor | None = None,
    error_decay: float = 0.0,
) -> None:
    """Pack each slice of ``source`` into a packet. Inexact: an element is off by up to half its block's scale.

    The scale of a block is its largest magnitude over 127 (8 bits) or 7 (4 bits), and at least 2^-126. A block with an
    element that is not finite becomes NaN.

    Args:
        source: float32, bfloat16 or float16, contiguous, of ``num_slices`` slices of one length.
        packets: uint8, 1-D and contiguous, ``packet_bytes`` for each slice, 16-byte aligned on CUDA.
        bits: 8 or 4.
        num_slices: The number of slices, whose blocks are separate.
        error: bfloat16, as long as ``source``: what earlier calls lost. It is added to ``source``, and then becomes
            ``error_decay * error + (1 - error_decay) * lost``, or 0 in a block that is not finite. None: nothing is
            added or kept.
        error_decay: From 0 to below 1.

    Raises:
        ZeroEngineError: A tensor has another dtype, length, stride or device.
    """
    numel = _check("quantize", source, packets, bits, num_slices, num_slices)
    if error is not None:
        fits = error.dtype is torch.bfloat16 and error.numel() == source.numel() and error.is_contiguous()
        if not fits or error.device != source.device:
            raise ZeroEngineError(
                f"quantize: error has {error.numel()} elements of {error.dtype} on {error.device}; pass a contiguous "
                f"tensor of {source.numel()} bfloat16 on {source.device}"
            )
    arguments = (
        *(source.data_ptr(), DTYPE_CODES[source.dtype], numel, num_slices, bits, packets.data_ptr()),
        *(None if error is None else error.data_ptr(), error_decay),
    )
    if (cuda := _cuda_kernels(source.device)) is not None:
        _cuda_library.call(cuda, "ze_cuda_quantize", source.device, *arguments)
    elif source.device.type == "cpu" and (kernels := _cpu_kernels()) is not None:
        kernels.ze_quantize(*arguments, torch.get_num_threads())
    else:
        _packets_fallback.quantize(source, packets, bits, num_slices, error, error_decay)


def dequantize_sum(
    target: Tensor, packets: Tensor, *, bits: int, num_slices: int = 1, num_sources: int = 1, accumulate: bool = False
) -> None:
    """Write the sum of ``num_sources`` packets to each slice of ``target``, added in float32 in order, rounded once.

    Args:
        target: float32, bfloat16 or float16, contiguous, of ``num_slices`` slices of one length.
        packets: uint8, 1-D and contiguous: the packets of the first slice, then those of the second, and so on.
        bits: The ``bits`` of ``packets``.
        num_slices: The number of slices.
        num_sources: The number of packets of each slice.
        accumulate: Whether the old values of ``target`` are added last, rather than overwritten.

    Raises:
        ZeroEngineError: A tensor has another dtype, length, stride or device.
    """
    numel = _check("dequantize_sum", target, packets, bits, num_slices, num_slices * num_sources)
    arguments = (
        *(target.data_ptr(), DTYPE_CODES[target.dtype], accumulate, numel, num_slices, num_sources, bits),
        packets.data_ptr(),
    )
    if (cuda := _cuda_kernels(target.device)) is not None:
        _cuda_library.call(cuda, "ze_cuda_dequantize_sum", target.device, *arguments)
    elif target.device.type == "cpu" and (kernels := _cpu_kernels()) is not None:
        kernels.ze_dequantize_sum(*arguments, torch.get_num_threads())
    else:
        _packets_fallback.dequantize_sum(target, packets, bits, num_slices, num_sources, accumulate)


def _check(call: str, values: Tensor, packets: Tensor, bits: int, num_slices: int, num_packets: int) -> int:
    """Return the elements of a slice."""
    if bits not in (8, 4):
        raise ZeroEngineError(f"{call}: bits is 8 or 4, found {bits!r}")
    if values.dtype not in DTYPE_CODES or not values.is_contiguous() or values.numel() % num_slices:
        raise ZeroEngineError(
            f"{call}: got {values.numel()} elements of {values.dtype} with strides {values.stride()} for {num_slices} "
            f"slices; pass a contiguous tensor of {', '.join(map(str, DTYPE_CODES))}, of equal slices"
        )
    numel = values.numel() // num_slices
    nbytes = num_packets * packet_bytes(numel, bits)
    if packets.dtype is not torch.uint8 or packets.numel() != nbytes or not packets.is_contiguous():
        raise ZeroEngineError(
            f"{call}: packets has {packets.numel()} elements of {packets.dtype}; pass a contiguous uint8 tensor of "
            f"{nbytes}, for {num_packets} packets of {numel} elements"
        )
    if packets.device != values.device:
        raise ZeroEngineError(f"{call}: values are on {values.device}, packets on {packets.device}; pass one device")
    return numel


@functools.cache
def _cpu_kernels() -> ctypes.CDLL | None:
    """Return the CPU library; None if it is missing or was built before it had these functions."""
    handle = library()
    if handle is None or not hasattr(handle, "ze_quantize"):
        return None
    handle.ze_quantize.argtypes = [*_QUANTIZE, c_int]
    handle.ze_dequantize_sum.argtypes = [*_DEQUANTIZE, c_int]
    return handle


def _cuda_kernels(device: torch.device) -> ctypes.CDLL | None:
    """Return the CUDA library for tensors on ``device``, likewise."""
    handle = _cuda_library.cuda_library(device)
    if handle is None or not hasattr(handle, "ze_cuda_quantize"):
        return None
    handle.ze_cuda_quantize.argtypes = [c_int, c_void_p, *_QUANTIZE]
    handle.ze_cuda_dequantize_sum.argtypes = [c_int, c_void_p, *_DEQUANTIZE]
    return handle
