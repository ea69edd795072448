"""Which gradient buffers fit a unit, and copies into them that are collected and launched together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroengine import ops
from zeroengine.runtime import gradient_buffers
from zeroengine.runtime.gradient_buffers import BufferSize, CastCopies, buffer_size

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
STEPS = st.tuples(
    st.integers(0, 3), st.sampled_from(FLOATS), st.booleans()
)  # target, the source's dtype, whether added


@given(st.lists(STEPS, max_size=12), st.integers(1, 5), st.integers(0, 1 << 16))
@settings(max_examples=100, deadline=None)
def test_collected_copies_give_the_bits_of_single_copies(
    steps: list[tuple[int, torch.dtype, bool]], max_tensors: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    expected = [torch.randn(5, generator=generator).to(FLOATS[i % 3]) for i in range(4)]
    collected = [target.clone() for target in expected]
    copies = CastCopies()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buffers, "MAX_TENSORS_PER_LAUNCH", max_tensors)
        for number, dtype, add in steps:
            source = torch.randn(5, generator=generator).to(dtype)
            if add:
                expected[number].copy_(expected[number].float() + source.float())
            else:
                expected[number].copy_(source)
            copies.copy(source, collected[number], accumulate=add)
        copies.flush()
    assert all(torch.equal(single, together) for single, together in zip(expected, collected, strict=True))


def test_pending_copies_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buffers, "MAX_PENDING_BYTES", 64)
    target, copies = torch.zeros(3, 8), CastCopies()
    for row in target:
        copies.copy(torch.ones(8), row, accumulate=False)
    assert target.sum(1).tolist() == [8, 8, 0]


def test_discarded_copies_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(ops, "cast_copy", lambda *args, **more: done.append(args))
    copies = CastCopies()
    copies.copy(torch.ones(8), torch.zeros(8), accumulate=True)
    copies.discard()
    copies.flush()
    assert not done


@pytest.mark.parametrize(
    ("numels", "expected"),
    [
        # An embedding and blocks: the blocks share its buffer and one that fits them.
        ([96, 28, 28, 28], {96: BufferSize(96, 96, 1), 28: BufferSize(28, 96, 2)}),
        ([28, 28, 28], {28: BufferSize(28, 28, 2)}),
        # A head of the size of the embedding, and blocks that are small beside it.
        ([96, 24, 24, 96], {96: BufferSize(96, 96, 2), 24: BufferSize(24, 24, 2)}),
        ([5], {5: BufferSize(5, 5, 1)}),
    ],
)
def test_the_only_unit_of_the_largest_size_has_one_buffer(numels: list[int], expected: dict[int, BufferSize]) -> None:
    assert {numel: buffer_size(numel, numels) for numel in numels} == expected
