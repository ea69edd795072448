"""Pack tensors into integers of 8 or 4 bits with one scale per block, and add packets.

A block is 256 elements: one scale of 4 bytes for each block adds 1.6 % to integers of 8 bits. Smaller blocks would
follow outliers more closely and send more: blocks of 64 elements would add 6.3 %.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroengine.ops import _cuda_library, _packets_fallback
from zeroengine.ops._library import DTYPE_CODES, library
from zeroengine.ops._packets_fallback import packet_bytes


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
    """
    numel = _check(source, packets, bits, num_slices, num_slices)
    if error is not None:
        assert (error.dtype, error.numel(), error.device) == (torch.bfloat16, source.numel(), source.device)
        assert error.is_contiguous()
    arguments = (
        *(source.data_ptr(), DTYPE_CODES[source.dtype], numel, num_slices, bits, packets.data_ptr()),
        *(None if error is None else error.data_ptr(), error_decay),
    )
    if (cuda := _cuda_library.cuda_library(source.device)) is not None:
        _cuda_library.call(cuda, "ze_cuda_quantize", source.device, *arguments)
    elif source.device.type == "cpu" and (cpu := library()) is not None:
        cpu.ze_quantize(*arguments, torch.get_num_threads())
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
    """
    numel = _check(target, packets, bits, num_slices, num_slices * num_sources)
    arguments = (
        *(target.data_ptr(), DTYPE_CODES[target.dtype], accumulate, numel, num_slices, num_sources, bits),
        packets.data_ptr(),
    )
    if (cuda := _cuda_library.cuda_library(target.device)) is not None:
        _cuda_library.call(cuda, "ze_cuda_dequantize_sum", target.device, *arguments)
    elif target.device.type == "cpu" and (cpu := library()) is not None:
        cpu.ze_dequantize_sum(*arguments, torch.get_num_threads())
    else:
        _packets_fallback.dequantize_sum(target, packets, bits, num_slices, num_sources, accumulate)


def _check(values: Tensor, packets: Tensor, bits: int, num_slices: int, num_packets: int) -> int:
    """Return the elements of a slice."""
    assert bits in (8, 4) and values.dtype in DTYPE_CODES and values.is_contiguous(), (bits, values.dtype)
    assert values.numel() % num_slices == 0, (values.numel(), num_slices)
    numel = values.numel() // num_slices
    assert packets.dtype is torch.uint8 and packets.is_contiguous() and packets.device == values.device
    assert packets.numel() == num_packets * packet_bytes(numel, bits), (packets.numel(), num_packets, numel)
    return numel
