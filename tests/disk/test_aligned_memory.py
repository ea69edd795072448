"""Memory for direct I/O: aligned, zero, and freed with its tensor."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroengine.comm.interfaces import PagedBuffer
from zeroengine.disk.aligned_memory import ALIGNMENT, aligned_zeros


@given(numel=st.integers(0, 1 << 21), dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
@settings(max_examples=40, deadline=None)
def test_aligned_memory_is_aligned_and_zero(numel: int, dtype: torch.dtype) -> None:
    x = aligned_zeros(numel, dtype)
    assert x.shape == (numel,) and x.dtype == dtype and x.is_contiguous() and x.storage_offset() == 0
    assert x.data_ptr() % ALIGNMENT == 0 and x.untyped_storage().nbytes() == x.nbytes
    assert not x.any()
    x.fill_(1)


def resident() -> int:
    """The bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_aligned_memory_is_freed_with_its_tensor() -> None:
    before = resident()
    for _ in range(50):
        view = aligned_zeros(1 << 23, torch.float32).fill_(1)[5:]
    assert resident() - before < 200 << 20
    assert view.sum() == (1 << 23) - 5


def test_memory_in_huge_pages_takes_no_more_than_it_counts() -> None:
    # A little more than a huge page each.
    numel = (2 << 20) + 100_000
    before = resident()
    aligned = [aligned_zeros(numel, torch.uint8).fill_(1) for _ in range(40)]
    buffers = [PagedBuffer(numel, torch.uint8).tensor.fill_(1) for _ in range(40)]
    assert resident() - before < 1.2 * numel * len([*aligned, *buffers])
