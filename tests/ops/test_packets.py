"""Quantized packets: the error of each element, the same bits from every kernel, and values that are not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zeroengine import ops
from zeroengine.ops import _packets_fallback

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 2, 7, 255, 256, 257, 1000, 5003]
BLOCK = 256
# Each element beyond this of a block is off by more than half a step.
HALF_A_STEP = 0.5 * (1 + 2.0**-16)


def values(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Blocks of very different magnitudes, with outliers and zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator, dtype=torch.float64)
    blocks = torch.arange(numel) // BLOCK
    x = x * 10.0 ** (blocks % 5 - 3) * torch.where(torch.rand(numel, generator=generator) < 0.01, 50.0, 1.0)
    x[torch.rand(numel, generator=generator) < 0.1] = 0
    return x.to(dtype)


def packed(x: Tensor, bits: int, num_slices: int = 1, error: Tensor | None = None, decay: float = 0.0) -> Tensor:
    numel = x.numel() // num_slices
    packets = torch.full((num_slices * ops.packet_bytes(numel, bits),), 0xAA, dtype=torch.uint8)
    ops.quantize(x, packets, bits=bits, num_slices=num_slices, error=error, error_decay=decay)
    return packets


def unpacked(packets: Tensor, like: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(like.numel(), dtype=dtype)
    ops.dequantize_sum(out, packets, bits=bits)
    return out


def need_kernels() -> None:
    if ops.library() is None:
        pytest.skip("the CPU library was not built")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_each_element_is_off_by_at_most_half_its_blocks_scale(numel: int, dtype: torch.dtype, bits: int) -> None:
    x = values(numel, dtype)
    exact, found = x.double(), unpacked(packed(x, bits), x, bits).double()
    for begin in range(0, numel, BLOCK):
        block = exact[begin : begin + BLOCK]
        scale = block.abs().max() / (127 if bits == 8 else 7)
        assert (found[begin : begin + BLOCK] - block).abs().max() <= scale * HALF_A_STEP
    assert torch.equal(found[exact == 0], exact[exact == 0])


@pytest.mark.parametrize("bits", [8, 4])
def test_the_smallest_and_the_largest_numbers_keep_the_bound(bits: int) -> None:
    steps = 127 if bits == 8 else 7
    for magnitude in (2.0**-149, 190 * 2.0**-149, 2.0**-127, 2.0**-126, 3e-38, 1e38):
        x = (torch.linspace(-1, 1, BLOCK, dtype=torch.float64) * magnitude).float()
        step = max(x.double().abs().max().item() / steps, 2.0**-126)
        assert (unpacked(packed(x, bits), x, bits).double() - x.double()).abs().max() <= step * HALF_A_STEP


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [float("inf"), -float("inf"), float("nan")])
def test_a_value_that_is_not_finite_stays_noticeable(wrong: float, dtype: torch.dtype, bits: int) -> None:
    x = values(3 * BLOCK + 5, dtype)
    for place in (0, BLOCK + 17, x.numel() - 1):
        broken = x.clone()
        broken[place] = wrong
        found = unpacked(packed(broken, bits), x, bits, dtype)
        first = place // BLOCK * BLOCK
        assert found[first : first + BLOCK].isnan().all()
        assert found.isfinite().sum() == x.numel() - found[first : first + BLOCK].numel()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_error", [False, True])
def test_kernels_and_torch_give_the_same_packets_and_errors(
    isa: str, with_error: bool, dtype: torch.dtype, bits: int
) -> None:
    need_kernels()
    for numel in SIZES:
        x = values(3 * numel, dtype)
        if numel > 1:
            x[numel] = float("inf")
        first, second = (values(3 * numel, torch.bfloat16, seed=1) * 1e-3 if with_error else None for _ in range(2))
        packets = packed(x, bits, 3, first, 0.8)
        expected = torch.empty_like(packets)
        _packets_fallback.quantize(x, expected, bits, 3, second, 0.8)
        assert torch.equal(packets, expected), numel
        if first is not None and second is not None:
            assert torch.equal(first, second), numel
            assert first.isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packets_are_added_in_order_and_rounded_once(isa: str, dtype: torch.dtype, bits: int) -> None:
    need_kernels()
    for numel in SIZES:
        pieces = [values(2 * numel, torch.float32, seed) for seed in range(3)]
        size = ops.packet_bytes(numel, bits)
        by_source = [packed(piece, bits, 2).view(2, size) for piece in pieces]
        packets = torch.stack(by_source, 1).flatten()
        decoded = [
            torch.cat([unpacked(packet, piece[:numel], bits) for packet in packet_pair])
            for piece, packet_pair in zip(pieces, by_source, strict=True)
        ]
        before = values(2 * numel, dtype, 9)
        for accumulate in (False, True):
            total = decoded[0] + decoded[1] + decoded[2]
            wanted = (total + before.float() if accumulate else total).to(dtype)
            for run in (ops.dequantize_sum, None):
                target = before.clone()
                if run is not None:
                    run(target, packets, bits=bits, num_slices=2, num_sources=3, accumulate=accumulate)
                else:
                    _packets_fallback.dequantize_sum(target, packets, bits, 2, 3, accumulate)
                assert torch.equal(target, wanted), (numel, accumulate)


def test_the_error_that_is_kept_makes_up_for_what_was_lost() -> None:
    """The mean of many packets of one value comes closer to it than half a step."""
    x = values(1000, torch.float32)
    error, total = torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.float64)
    for _ in range(200):
        total += unpacked(packed(x, 4, error=error), x, 4).double()
    once = (unpacked(packed(x, 4), x, 4).double() - x.double()).abs().mean()
    assert (total / 200 - x.double()).abs().mean() < 0.05 * once


def test_wrong_arguments_are_refused() -> None:
    x, packets = torch.zeros(10), torch.zeros(32, dtype=torch.uint8)
    for source, target, bits in ((x, packets, 2), (x.double(), packets, 8), (x, packets[1:], 8)):
        with pytest.raises(AssertionError):
            ops.quantize(source, target, bits=bits)
    with pytest.raises(AssertionError):
        ops.quantize(x, packets, bits=8, error=torch.zeros(10))
