"""Boxes cover a run, once, in order, and are few."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroengine.partition.boxes import Box, boxes_of_run

SHAPES = st.lists(st.integers(1, 5), max_size=4)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[int], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(runs())
def test_the_boxes_hold_the_elements_of_the_run_in_order(run: tuple[list[int], int, int]) -> None:
    shape, start, stop = run
    tensor = torch.arange(math.prod(shape)).view(shape)
    found: list[int] = []
    for box in boxes_of_run(shape, start, stop):
        part = tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        assert part.shape == box.sizes and box.numel == part.numel()
        assert part.flatten()[0] == box.start
        found += part.flatten().tolist()
    assert found == list(range(start, stop))


@given(runs())
def test_a_run_takes_at_most_two_boxes_for_each_dimension_less_one(run: tuple[list[int], int, int]) -> None:
    shape, start, stop = run
    assert len(list(boxes_of_run(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


def test_boxes_are_those_of_the_docstrings_picture() -> None:
    assert list(boxes_of_run((3, 4), 2, 10)) == [
        Box((0, 2), (1, 2), 2), Box((1, 0), (1, 4), 4), Box((2, 0), (1, 2), 8),
    ]  # fmt: skip
