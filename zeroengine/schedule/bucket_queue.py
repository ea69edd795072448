"""Which units are reduced together, and in which order. See "Units are reduced in one order" in ``reduce_order.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class BucketQueue:
    """Units that are ready, and wait until there are enough of them to launch their reduces together.

    Args:
        order: The units, by number, in the order in which they are reduced.
        numels: By number, the elements of each unit's flat buffer.
        bucket_numel: Elements of the units that one bucket holds at most. A larger unit is a bucket alone; 0 launches
            unit by unit.
    """

    def __init__(self, order: Sequence[int], numels: Sequence[int], bucket_numel: int) -> None:
        self._order, self._numels, self._bucket_numel = order, numels, bucket_numel
        # The units of the order that have joined a bucket in this backward, or need no reduce.
        self._num_queued = 0
        self._bucket: list[int] = []

    def restart(self) -> None:
        """Wait for every unit again."""
        self._num_queued = 0

    def queue_in_order(self, is_ready: Callable[[int], bool], is_reduced: Callable[[int], bool]) -> list[int]:
        """Move units into the bucket, up to the first one that is not ready.

        Args:
            is_ready: Returns whether a unit may be reduced now.
            is_reduced: Returns whether a unit has a reduce in this backward. Otherwise the queue goes past it.

        Returns:
            The units whose reduces are to be launched now, in order.
        """
        due: list[int] = []
        while self._num_queued < len(self._order) and is_ready(unit := self._order[self._num_queued]):
            self._num_queued += 1
            if not is_reduced(unit):
                continue
            # A bucket holds whole units. If a unit does not fit, the reduces of the queued units are launched first.
            if self._queued_numel() + self._numels[unit] > self._bucket_numel:
                due += self.take_bucket()
            self._bucket.append(unit)
            if self._queued_numel() >= self._bucket_numel:
                due += self.take_bucket()
        return due

    def take_bucket(self) -> list[int]:
        """Return the units in the bucket, which are in it no longer."""
        bucket, self._bucket = self._bucket, []
        return bucket

    def _queued_numel(self) -> int:
        return sum(self._numels[unit] for unit in self._bucket)
