"""Which units are reduced together, and in which order. See "Units are reduced in one order" in ``reducer.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar


class Reducible(Protocol):
    """What a bucket needs to know of a unit, so that the planner can play a backward without memory."""

    @property
    def numel(self) -> int:
        """The elements of the flat buffer."""


U = TypeVar("U", bound=Reducible)


class BucketQueue(Generic[U]):
    """Units that are ready, and wait until there are enough of them to launch their reduces together.

    Args:
        order: All units, in the order in which they are reduced.
        bucket_numel: Elements of the units that one bucket holds at most. A larger unit is a bucket alone; 0 launches
            unit by unit.
    """

    def __init__(self, order: Sequence[U], bucket_numel: int) -> None:
        self.order, self._bucket_numel = order, bucket_numel
        # The units of ``order`` that have joined a bucket in this backward, or need no reduce.
        self._num_queued = 0
        self._bucket: list[U] = []

    def restart(self) -> None:
        """Wait for every unit again."""
        self._num_queued = 0

    def queue_in_order(self, is_ready: Callable[[U], bool], is_reduced: Callable[[U], bool]) -> list[U]:
        """Move units into the bucket, up to the first one that is not ready.

        Args:
            is_ready: Returns whether a unit may be reduced now.
            is_reduced: Returns whether a unit has a reduce in this backward. Otherwise the queue goes past it.

        Returns:
            The units whose reduces are to be launched now, in order.
        """
        due: list[U] = []
        while self._num_queued < len(self.order) and is_ready(unit := self.order[self._num_queued]):
            self._num_queued += 1
            if not is_reduced(unit):
                continue
            # A bucket holds whole units. If a unit does not fit, the reduces of the queued units are launched first.
            if self._queued_numel() + unit.numel > self._bucket_numel:
                due += self.take_bucket()
            self._bucket.append(unit)
            if self._queued_numel() >= self._bucket_numel:
                due += self.take_bucket()
        return due

    def take_bucket(self) -> list[U]:
        """Return the units in the bucket, which are in it no longer."""
        bucket, self._bucket = self._bucket, []
        return bucket

    def _queued_numel(self) -> int:
        return sum(unit.numel for unit in self._bucket)
