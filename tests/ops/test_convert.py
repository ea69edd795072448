"""ze_cast rounds as torch does, and ze_accumulate adds in float32, at every length and alignment."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from zeroengine import ops
from zeroengine.ops._library import DTYPE_CODES, Array

NARROW = [torch.bfloat16, torch.float16]
SIZES = [0, 1, 7, 8, 9, 31, 33, 1000]


def cast(src: Tensor, dtype: torch.dtype) -> Tensor:
    library = ops.library()
    assert library is not None
    dst = torch.empty(src.numel(), dtype=dtype)
    assert library.ze_cast(src.data_ptr(), dst.data_ptr(), DTYPE_CODES[dtype], src.numel()) == 0
    return dst


def accumulate(acc: Tensor, src: Tensor, init: bool) -> None:
    library = ops.library()
    assert library is not None
    assert library.ze_accumulate(acc.data_ptr(), src.data_ptr(), DTYPE_CODES[src.dtype], src.numel(), init) == 0


def floats_of_every_kind(dtype: torch.dtype) -> Tensor:
    """Random bit patterns, and every float that lies beside or between two neighbours of `dtype`."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).to(torch.int32).view(torch.float32)
    exact = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float().view(torch.int32)
    half = 1 << (15 if dtype == torch.bfloat16 else 12)
    near = [(exact + k).view(torch.float32) for k in (-half - 1, -half, -half + 1, -1, 0, 1, half - 1, half, half + 1)]
    return torch.cat([random, *near])


@pytest.mark.parametrize("dtype", NARROW)
def test_cast_rounds_to_nearest_even_and_keeps_nan(isa: str, dtype: torch.dtype) -> None:
    src = floats_of_every_kind(dtype)
    got, want = cast(src, dtype), src.to(dtype)
    number = ~src.isnan()
    assert torch.equal(got[number].view(torch.int16), want[number].view(torch.int16))
    assert got[~number].isnan().all()


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_accumulate_widens_every_bit_pattern(isa: str, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        src = floats_of_every_kind(torch.bfloat16)
    else:
        src = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    acc = torch.zeros(src.numel())
    accumulate(acc, src, init=True)
    number = ~src.isnan()
    assert torch.equal(acc[number].view(torch.int32), src.float()[number].view(torch.int32))
    assert acc[~number].isnan().all()


@pytest.mark.parametrize("dtype", DTYPE_CODES)
@pytest.mark.parametrize("n", SIZES)
def test_casts_take_any_length_and_alignment(isa: str, n: int, dtype: torch.dtype) -> None:
    for offset in (0, 1, 5):
        base, addend = torch.randn(n + offset)[offset:], torch.randn(n + offset).to(dtype)[offset:]
        want = base + addend.float()
        accumulate(base, addend, init=False)
        assert torch.equal(base, want)
        assert torch.equal(cast(base, dtype), base.to(dtype))


def test_an_unknown_dtype_is_refused() -> None:
    if (library := ops.library()) is None:
        pytest.skip("zeroengine's CPU library was not built")
    x = torch.zeros(4)
    for code in (-1, 3):
        assert library.ze_cast(x.data_ptr(), x.data_ptr(), code, 4) != 0
        assert library.ze_accumulate(x.data_ptr(), x.data_ptr(), code, 4, 0) != 0
        assert library.ze_squared_norm(Array(x.data_ptr(), 4, code), 1, ctypes.c_double(), 1) != 0
