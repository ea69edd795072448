"""The runs of a shard that one kernel call updates."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zeroengine.optim.segments import Segment, segments_of
from zeroengine.partition.degrees import degrees_of_stage
from zeroengine.partition.layout import FlatLayout

UNITS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 2), st.booleans(), st.integers(0, 1)), min_size=1, max_size=8
)  # elements, group, whether used, steps behind


@given(UNITS, st.integers(1, 4), st.sampled_from([0, 1, 3]))
@settings(max_examples=150, deadline=None)
def test_each_element_with_a_gradient_is_in_one_segment_and_no_other_element_is_in_any(
    unit: list[tuple[int, int, bool, int]], world_size: int, stage: int
) -> None:
    sizes, groups, used, steps = (list(column) for column in zip(*unit, strict=True))
    degrees = degrees_of_stage(stage, world_size)
    layout = FlatLayout.build("unit", [(str(i), (n,)) for i, n in enumerate(sizes)], degrees, world_size)
    for rank in range(world_size):
        start, stop = layout.shard_range(rank, degrees.optimizer)
        found: dict[int, tuple[int, int]] = {}
        last = 0
        for segment in segments_of(layout, rank, groups, used, steps):
            assert last <= segment.start < segment.stop <= stop - start
            last = segment.stop
            found |= dict.fromkeys(
                range(start + segment.start, start + segment.stop), (segment.group, segment.steps_behind)
            )
        for i, slot in enumerate(layout.slots):
            for element in range(max(start, slot.offset), min(stop, slot.end)):
                assert found.pop(element, None) == ((groups[i], steps[i]) if used[i] else None)
        padding = set(found)  # joins segments, and stays zero
        assert not padding & {e for slot in layout.slots for e in range(slot.offset, slot.end)}


def test_neighbours_of_one_group_and_step_are_one_kernel_call() -> None:
    degrees = degrees_of_stage(0, 1)
    layout = FlatLayout.build("unit", [(str(i), (10,)) for i in range(4)], degrees, 1)
    assert segments_of(layout, 0, [0, 0, 0, 0], [True] * 4, [0] * 4) == [Segment(0, 106, 0, 0)]
    assert len(segments_of(layout, 0, [0, 0, 1, 1], [True] * 4, [0] * 4)) == 2
    assert len(segments_of(layout, 0, [0, 0, 0, 0], [True] * 4, [0, 1, 1, 0])) == 3
    assert segments_of(layout, 0, [0, 0, 0, 0], [True, False, True, True], [0] * 4) == [
        Segment(0, 10, 0, 0), Segment(64, 106, 0, 0)
    ]  # fmt: skip
