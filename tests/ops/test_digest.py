"""A digest says which values a tensor has and where: parts add up, every bit counts, and nothing else does."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import Tensor

from zeroengine import ops
from zeroengine.ops import _fallback

digest_module = importlib.import_module("zeroengine.ops.digest")

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
CHUNK = 8 << 15  # bytes that the kernel sums at a time
# Bytes around a word, the kernel's stretches and chunks, and a thread's least share.
SIZES = [0, 1, 7, 8, 9, 1023, 1025, 4096, 4097, CHUNK - 1, CHUNK + 8, 5 * CHUNK + 2053]


def random_bytes(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_definition(values: Tensor, first: int = 0) -> int:
    """The docstring of ``ops.digest`` in whole numbers, as an int64."""
    raw = bytes(values.flatten().view(torch.uint8).tolist())
    total, first_place = 0, first * values.element_size() // 8
    for place, begin in enumerate(range(0, len(raw), 8), first_place):
        x = (int.from_bytes(raw[begin : begin + 8], "little") + (place + 1) * 0x9E3779B97F4A7C15) % (1 << 64)
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
        total += x ^ x >> 31
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows_words", [1, 30, 1 << 20])
def test_columns_and_rows_add_up_to_the_digest_of_the_matrix(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows_words: int
) -> None:
    monkeypatch.setattr(digest_module, "_ROWS_WORDS", rows_words)
    word = 8 // dtype.itemsize
    matrix = random_bytes(7 * 12 * 8).view(dtype).view(7, 12 * word)
    whole, first = int(ops.digest(matrix, 5 * word)), 5 * word
    parts = [(0, 7, 0, 2), (0, 2, 2, 11), (2, 6, 2, 11), (6, 7, 2, 11), (0, 7, 11, 12)]  # rows, and words of each row
    sums = [
        int(ops.digest(matrix[top:end, left * word : right * word], first + (top * 12 + left) * word, 12 * word))
        for top, end, left, right in parts
    ]
    assert (sum(sums) - whole) % (1 << 64) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_of_any_dtype_is_the_sum_of_its_definition(dtype: torch.dtype) -> None:
    for numel in (0, 1, 3, 65):
        values = random_bytes(numel * dtype.itemsize, numel).view(dtype) if dtype is not torch.bool else None
        values = random_bytes(numel).gt(127) if values is None else values
        result = ops.digest(values, 64)
        assert result.dtype is torch.int64 and result.shape == ()
        assert (
            int(result)
            == by_definition(values, 64)
            == int(_fallback.digest(values.view(torch.uint8), 8 * dtype.itemsize))
        )
    assert int(ops.digest(torch.ones((), dtype=torch.int64).to(dtype))) != 0, "a single number is no empty tensor"


def test_instruction_sets_threads_alignment_and_torch_agree(isa: str) -> None:
    threads = torch.get_num_threads()
    for size in SIZES:
        values, moved = random_bytes(size), torch.empty(size + 3, dtype=torch.uint8)[3:]
        moved.copy_(values)
        wanted = int(_fallback.digest(values, 1 << 40))
        try:
            for num_threads in (1, 2, 3, 7):
                torch.set_num_threads(num_threads)
                assert int(ops.digest(moved, 8 << 40)) == wanted, (size, num_threads)
        finally:
            torch.set_num_threads(threads)


def test_the_definition_holds_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(33, 5)
    wanted = int(ops.digest(values.bfloat16()))
    # The function hides the module of its name.
    monkeypatch.setattr(importlib.import_module("zeroengine.ops.digest"), "library", lambda: None)
    assert int(ops.digest(values.bfloat16())) == wanted


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_digests_of_parts_add_up_to_that_of_the_whole(dtype: torch.dtype) -> None:
    """Cut at multiples of 32 elements, as shards are, and of 8 bytes."""
    values = random_bytes(1003 * dtype.itemsize).view(dtype)
    whole, least = ops.digest(values), 8 // math.gcd(8, dtype.itemsize)
    for size in (least, 32, 96, 512):
        parts = [ops.digest(part, index * size) for index, part in enumerate(values.split(size))]
        assert torch.equal(torch.stack(parts[::-1]).sum(), whole), size
    if least > 1:
        with pytest.raises(AssertionError):
            ops.digest(values[1:], 1)


def test_every_bit_and_every_place_counts() -> None:
    """One bit, two elements that change places, and zeros of another length or at another place."""
    values = torch.randn(40).bfloat16()
    seen = [int(ops.digest(values)), int(ops.digest(values.roll(1))), int(ops.digest(values.roll(4)))]
    for bit in range(16):
        for index in range(40):
            other = values.clone()
            other.view(torch.int16)[index] ^= 1 << bit if bit < 15 else -(1 << 15)
            seen.append(int(ops.digest(other)))
    for index in range(39):
        order = list(range(40))
        order[index : index + 2] = index + 1, index
        seen.append(int(ops.digest(values[order])))
    seen += [int(ops.digest(torch.zeros(8 * n))) for n in range(1, 20)]
    seen += [int(ops.digest(torch.zeros(8), 1000 * n)) for n in range(1, 20)]
    blocks = torch.eye(4).repeat_interleave(64, dim=1)
    seen += [int(ops.digest(blocks[order])) for order in ([0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 3, 2], [3, 2, 1, 0])]
    assert len(set(seen)) == len(seen)


def test_a_digest_is_of_values_and_not_of_memory() -> None:
    x, z = torch.randn(6, 8), torch.randn(4, dtype=torch.complex64)
    assert torch.equal(ops.digest(x.t()), ops.digest(x.t().contiguous()))
    assert torch.equal(ops.digest(z.conj()), ops.digest(z.conj().resolve_conj()))
    assert torch.equal(ops.digest(z.conj().imag), ops.digest(z.conj().imag.clone().resolve_neg()))
    assert torch.equal(ops.digest(torch.nn.Parameter(x)), ops.digest(x))


def test_many_digests_are_read_together() -> None:
    tensors = [random_bytes(size) for size in SIZES]
    assert ops.digests(tensors) == [int(ops.digest(x)) for x in tensors]
    assert ops.digests([]) == []
