"""Quantized packets by torch's own kernels, with the bits of csrc, and the layout of a packet. See ``packets``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

# ZE_QUANTIZED_BLOCK of csrc/zeroengine.h.
BLOCK = 256
_SMALLEST_SCALE = 2.0**-126


def _scales_bytes(numel: int) -> int:
    blocks = -(-numel // BLOCK)
    return -(-4 * blocks // 16) * 16


def packet_bytes(numel: int, bits: int) -> int:
    """Return the bytes of a packet of ``numel`` elements with integers of ``bits`` bits, 8 or 4."""
    codes = numel if bits == 8 else -(-numel // 2)
    return _scales_bytes(numel) + -(-codes // 16) * 16


def quantize(
    source: Tensor, packets: Tensor, bits: int, num_slices: int, error: Tensor | None, error_decay: float
) -> None:
    """Run ``zeroengine.ops.quantize``."""
    numel = source.numel() // num_slices
    values = source.reshape(num_slices, numel).float()
    kept = None if error is None else error.view(num_slices, numel).float()
    if kept is not None:
        values = values + kept
    blocks = pad(values, (0, -numel % BLOCK)).view(num_slices, -1, BLOCK)
    # As integers, magnitudes are in the order of their values, and NaN is above infinity.
    magnitude = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1) if numel else blocks.new_zeros(num_slices, 0)
    finite = magnitude < 0x7F800000
    largest = torch.where(finite, magnitude, 0).to(torch.int32).view(torch.float32)
    scales = (largest / (127 if bits == 8 else 7)).clamp_min(_SMALLEST_SCALE)
    codes = (blocks / scales.unsqueeze(-1)).round_()
    # Integers of a block that is not finite are 0, and its scale is NaN.
    codes = torch.where(finite.unsqueeze(-1), codes, 0.0)
    if error is not None and kept is not None:
        lost = (blocks - codes * scales.unsqueeze(-1)).view(num_slices, -1)[:, :numel]
        # The factors are rounded to fp32, as in the kernels.
        decay = torch.tensor(error_decay, dtype=torch.float32, device="cpu").item()
        added = (1 - torch.tensor(error_decay, dtype=torch.float32, device="cpu")).item()
        is_finite = finite.repeat_interleave(BLOCK, 1)[:, :numel]
        error.view(num_slices, numel).copy_(torch.where(is_finite, kept * decay + lost * added, 0.0))
    scales = torch.where(finite, scales, float("nan"))
    integers = codes.to(torch.int8).view(torch.uint8).view(num_slices, -1)[:, :numel]
    if bits == 4:
        pairs = pad(integers & 15, (0, numel % 2)).view(num_slices, -1, 2)
        integers = pairs[..., 0] | pairs[..., 1] << 4
    out = packets.view(num_slices, packet_bytes(numel, bits))
    out.zero_()
    out[:, : 4 * scales.shape[1]] = scales.contiguous().view(torch.uint8)
    first = _scales_bytes(numel)
    out[:, first : first + integers.shape[1]] = integers


def dequantize_sum(
    target: Tensor, packets: Tensor, bits: int, num_slices: int, num_sources: int, accumulate: bool
) -> None:
    """Run ``zeroengine.ops.dequantize_sum``."""
    numel = target.numel() // num_slices
    if not numel:
        return
    num_blocks, first = -(-numel // BLOCK), _scales_bytes(numel)
    by_source = packets.view(num_slices, num_sources, -1)
    out = target.view(num_slices, numel)
    total = torch.empty(0)
    for source in range(num_sources):
        packet = by_source[:, source]
        scales = packet[:, : 4 * num_blocks].contiguous().view(torch.float32)
        integers = packet[:, first:]
        if bits == 4:
            halves = torch.stack([integers & 15, integers >> 4], -1).view(num_slices, -1)
            # Flipping the sign bit and subtracting it again extends the sign.
            codes = (halves ^ 8).float() - 8
        else:
            codes = integers.contiguous().view(torch.int8).float()
        codes = pad(codes[:, :numel], (0, -numel % BLOCK)).view(num_slices, num_blocks, BLOCK)
        values = (codes * scales.unsqueeze(-1)).view(num_slices, -1)[:, :numel]
        total = values if source == 0 else total + values
    out.copy_(total + out.float() if accumulate else total)
