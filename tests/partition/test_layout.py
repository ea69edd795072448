"""Every element of every parameter has one place and one owner, whatever the degrees."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroengine import ZeroEngineError
from zeroengine.partition import layout as flat_layouts
from zeroengine.partition.degrees import STAGES, Degrees, degrees_of_stage
from zeroengine.partition.layout import PARAM_ALIGN, SHARD_ALIGN, FlatLayout, ShardSpan
from zeroengine.utils.formats import round_up

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Degrees, int]:
    """Degrees that nest, and a world size that they divide."""
    factors = [draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4)]
    parameters, gradients, optimizer, world_size = (math.prod(factors[: i + 1]) for i in range(4))
    return Degrees(optimizer, gradients, parameters), world_size


def layout_of(shapes: list[tuple[int, ...]], degrees: Degrees, world_size: int, align: int = 1) -> FlatLayout:
    return FlatLayout.build("unit", [(f"p{i}", shape) for i, shape in enumerate(shapes)], degrees, world_size, align)


@given(SHAPES, chains())
@settings(max_examples=80, deadline=None)
def test_the_shards_of_each_degree_tile_the_buffer_and_each_is_held_equally_often(
    shapes: list[tuple[int, ...]], chain: tuple[Degrees, int]
) -> None:
    degrees, world_size = chain
    layout = layout_of(shapes, degrees, world_size)
    for degree in (degrees.parameters, degrees.gradients, degrees.optimizer):
        held = Counter(layout.shard_range(rank, degree) for rank in range(world_size))
        assert set(held.values()) == {world_size // degree}
        ranges = sorted(held)
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == layout.numel
        assert {stop - start for start, stop in ranges} == {layout.shard_numel(degree)}


@given(SHAPES, chains())
@settings(max_examples=80, deadline=None)
def test_a_rank_counts_the_same_part_of_units_of_all_degrees_and_each_part_once(
    shapes: list[tuple[int, ...]], chain: tuple[Degrees, int]
) -> None:
    degrees, world_size = chain
    layout = layout_of(shapes, degrees, world_size)
    for degree in (1, degrees.parameters, degrees.gradients, degrees.optimizer):
        ranges = [layout.unreplicated_range(rank, degree, world_size) for rank in range(world_size)]
        assert ranges == [layout.unreplicated_range(rank, 1, world_size) for rank in range(world_size)]
        assert sorted(ranges) == [
            (part * layout.numel // world_size, (part + 1) * layout.numel // world_size) for part in range(world_size)
        ]
        for rank, (start, stop) in enumerate(ranges):
            first, last = layout.shard_range(rank, degree)
            assert first <= start <= stop <= last


@given(SHAPES, chains())
@settings(max_examples=80, deadline=None)
def test_a_rank_s_optimizer_shard_lies_in_its_gradient_shard_and_that_in_its_parameter_shard(
    shapes: list[tuple[int, ...]], chain: tuple[Degrees, int]
) -> None:
    degrees, world_size = chain
    layout = layout_of(shapes, degrees, world_size)
    for rank in range(world_size):
        outer = (0, layout.numel)
        for degree in (degrees.parameters, degrees.gradients, degrees.optimizer):
            start, stop = layout.shard_range(rank, degree)
            assert outer[0] <= start < stop <= outer[1]
            outer = (start, stop)


@given(SHAPES, chains())
@settings(max_examples=60, deadline=None)
def test_the_spans_of_all_ranks_cover_each_parameter_once_and_no_padding(
    shapes: list[tuple[int, ...]], chain: tuple[Degrees, int]
) -> None:
    degrees, world_size = chain
    layout = layout_of(shapes, degrees, world_size)
    for degree in (degrees.parameters, degrees.gradients, degrees.optimizer):
        found: Counter[tuple[int, int]] = Counter()
        for rank in range(world_size):
            start, stop = layout.shard_range(rank, degree)
            last = 0
            for span in layout.spans(rank, degree):
                slot = layout.slots[span.param_index]
                assert span.numel > 0
                assert last <= span.shard_offset and span.shard_offset + span.numel <= stop - start
                assert start + span.shard_offset == slot.offset + span.param_offset
                last = span.shard_offset + span.numel
                found.update((span.param_index, span.param_offset + i) for i in range(span.numel))
        elements = {(i, e) for i, slot in enumerate(layout.slots) for e in range(slot.numel)}
        assert found == Counter(dict.fromkeys(elements, world_size // degree))


@given(SHAPES, chains(), st.sampled_from([1, 48, 1024]))
@settings(max_examples=60, deadline=None)
def test_parameters_and_shards_are_aligned_and_do_not_overlap(
    shapes: list[tuple[int, ...]], chain: tuple[Degrees, int], align: int
) -> None:
    degrees, world_size = chain
    layout = layout_of(shapes, degrees, world_size, align)
    end = 0
    for slot, shape in zip(layout.slots, shapes, strict=True):
        assert slot.shape == shape and slot.numel == math.prod(shape)
        assert slot.offset % PARAM_ALIGN == 0 and slot.offset >= end
        end = slot.end
    assert end <= layout.numel
    assert layout.shard_numel(world_size) % align == layout.shard_numel(world_size) % SHARD_ALIGN == 0


@given(SHAPES, st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_every_element_lies_at_the_same_place_at_every_stage(shapes: list[tuple[int, ...]], world_size: int) -> None:
    layouts = [layout_of(shapes, degrees_of_stage(stage, world_size), world_size) for stage in STAGES]
    assert len({(layout.slots, layout.numel) for layout in layouts}) == 1


def test_degrees_that_do_not_divide_the_ranks_are_an_error() -> None:
    with pytest.raises(ZeroEngineError, match="must divide the 6 ranks"):
        layout_of([(3,)], Degrees(4, 1, 1), 6)


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up_is_the_smallest_multiple_that_is_large_enough(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0 and 0 <= rounded - value < multiple


def test_the_layout_is_that_of_the_docstrings_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_layouts, "PARAM_ALIGN", 4)
    monkeypatch.setattr(flat_layouts, "SHARD_ALIGN", 8)
    layout = FlatLayout.build("unit", [("a", (7,)), ("b", (3, 4)), ("c", (6,))], Degrees(2, 2, 2), 2, 1)
    assert [slot.offset for slot in layout.slots] == [0, 8, 20] and layout.numel == 32
    assert layout.shard_range(1, 2) == (16, 32)
    assert list(layout.spans(1, 2)) == [ShardSpan(1, 8, 0, 4), ShardSpan(2, 0, 4, 6)]
