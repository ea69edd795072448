"""Which units are reduced together, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from zeroengine.schedule.bucket_queue import BucketQueue


@dataclass(eq=False)
class NumberedUnit:
    """A unit without memory."""

    number: int
    numel: int
    has_reduce: bool
    is_ready: bool = False


@given(st.data(), st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=8), st.integers(0, 20))
def test_units_are_reduced_in_one_order_in_whichever_order_they_complete(
    data: st.DataObject, sizes: list[tuple[int, bool]], bucket_numel: int
) -> None:
    units = [NumberedUnit(number, *size) for number, size in enumerate(sizes)]
    queue = BucketQueue(range(len(units)), [unit.numel for unit in units], bucket_numel)
    for _ in range(2):
        queue.restart()
        for unit in units:
            unit.is_ready = False
        reduced: list[NumberedUnit] = []
        for unit in data.draw(st.permutations(units)):
            unit.is_ready = True
            due = queue.queue_in_order(lambda unit: units[unit].is_ready, lambda unit: units[unit].has_reduce)
            reduced += [units[number] for number in due]
            first_missing = next((other.number for other in units if not other.is_ready), len(units))
            waiting = [u for u in units[:first_missing] if u.has_reduce and u not in reduced]
            # What waits is no full bucket, and nothing else that may be reduced.
            assert all(u.number < first_missing for u in reduced)
            assert not waiting or sum(u.numel for u in waiting) < bucket_numel
        assert reduced + [units[number] for number in queue.take_bucket()] == [
            unit for unit in units if unit.has_reduce
        ]
