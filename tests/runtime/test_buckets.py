"""Copies that wait for others give what copies done at once give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroengine import ops
from zeroengine.runtime import buckets
from zeroengine.runtime.buckets import CastCopies

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
STEPS = st.tuples(
    st.integers(0, 3), st.sampled_from(FLOATS), st.booleans()
)  # target, the source's dtype, whether added


@given(st.lists(STEPS, max_size=12), st.integers(1, 5), st.integers(0, 1 << 16))
@settings(max_examples=100, deadline=None)
def test_any_sequence_gives_the_bits_of_one_by_one(
    steps: list[tuple[int, torch.dtype, bool]], together: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    at_once = [torch.randn(5, generator=generator).to(FLOATS[i % 3]) for i in range(4)]
    waiting = [target.clone() for target in at_once]
    copies = CastCopies()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "MAX_TENSORS_PER_LAUNCH", together)
        for number, dtype, add in steps:
            source = torch.randn(5, generator=generator).to(dtype)
            if add:
                at_once[number].copy_(at_once[number].float() + source.float())
            else:
                at_once[number].copy_(source)
            copies.add(source, waiting[number], accumulate=add)
        copies.flush()
    assert all(torch.equal(one, other) for one, other in zip(at_once, waiting, strict=True))


def test_what_waits_is_bounded_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "MAX_PENDING_BYTES", 64)
    target, copies = torch.zeros(3, 8), CastCopies()
    for row in target:
        copies.add(torch.ones(8), row, accumulate=False)
    assert target.sum(1).tolist() == [8, 8, 0]


def test_what_is_forgotten_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(ops, "cast_copy", lambda *args, **more: done.append(args))
    copies = CastCopies()
    copies.add(torch.ones(8), torch.zeros(8), accumulate=True)
    copies.discard()
    copies.flush()
    assert not done
