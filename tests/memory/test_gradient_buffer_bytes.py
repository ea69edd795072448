"""How many gradient buffers a backward needs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroengine.comm.buffer_pool import ENOUGH_BUFFERS, BufferPool
from zeroengine.memory.gradient_buffer_bytes import GradientFlow, count_gradient_buffers
from zeroengine.runtime.gradient_buffers import buffer_size
from zeroengine.runtime.unit_gradients import GradientFormat

SHARDED = GradientFormat(torch.float32, torch.float32, is_sharded=True, is_offloaded=False)


def counts_of(numels: Sequence[int], *, at_once: bool = False) -> dict[int, int]:
    """The buffers, by their elements, of units of which each has its gradients before the one in front of it begins."""
    flows = [GradientFlow(numel, numel, SHARDED, index, index) for index, numel in enumerate(numels)]
    counts = count_gradient_buffers(flows, 0, at_once=at_once)
    return {numel: count for (numel, _), count in counts.items() if count}


@pytest.mark.parametrize(
    ("numels", "buffers"),
    [([96, 28, 28, 28], {96: 1, 28: 1}), ([28, 28, 28], {28: 2}), ([96, 28, 28, 96], {96: 2}), ([96], {96: 1})],
)
def test_an_embedding_has_one_buffer_of_its_size_and_equal_units_have_two(
    numels: list[int], buffers: dict[int, int]
) -> None:
    assert counts_of(numels) == buffers
    assert counts_of(numels, at_once=True) == {max(numels): 1}


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_no_speed_of_peers_needs_more_than_is_predicted(numels: list[int], random: random.Random) -> None:
    predicted = sum(numel * count for numel, count in counts_of(numels).items())

    def is_over(_: object, timeout_s: float) -> bool:
        return timeout_s > 0 or random.random() < 0.5

    pool: BufferPool[object] = BufferPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), is_over)
    for _ in range(3):
        for numel in reversed(numels):
            size = buffer_size(numel, numels)
            pool.put_back(pool.take(size.numel, largest=size.largest, enough=size.enough), object())
    assert pool.nbytes <= predicted
    # Two of the largest were enough before.
    large = [numel for numel in numels if 4 * numel > max(numels)]
    small = {numel for numel in numels if 4 * numel <= max(numels)}
    assert predicted <= ENOUGH_BUFFERS * (bool(large) * max(numels) + sum(small))
