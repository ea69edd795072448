"""The order in which units are needed, learnt from one forward or backward for the next."""

from __future__ import annotations

from collections.abc import Iterator

from zeroengine.runtime.unit import Unit

Visit = tuple[bool, Unit, int]  # in backward; a unit; its number among the unit's visits in this pass


class VisitOrder:
    """What was needed after what the last time. A wrong prediction costs time alone.

    Attributes:
        last: the unit that was needed last in this pass; None before the first.
    """

    def __init__(self) -> None:
        self._next: dict[Visit, Visit] = {}
        self._num_visits: dict[Unit, int] = {}  # in this pass
        self._last: Visit | None = None

    @property
    def last(self) -> Unit | None:
        return None if self._last is None else self._last[1]

    def start_pass(self) -> None:
        """Begin a forward or a backward."""
        self._last = None
        self._num_visits.clear()

    def end_pass(self) -> None:
        """Nothing comes after the last visit."""
        if self._last is not None:
            self._next.pop(self._last, None)

    def visit(self, unit: Unit, in_backward: bool) -> None:
        """Record that ``unit`` is needed now."""
        if self.last is unit:
            return
        self._num_visits[unit] = self._num_visits.get(unit, 0) + 1
        visit = (in_backward, unit, self._num_visits[unit])
        if self._last is not None:
            self._next[self._last] = visit
        self._last = visit

    def upcoming(self) -> Iterator[Unit]:
        """Yield the units that came after the present one, in order."""
        visit = self._last
        for _ in range(len(self._next)):  # at most once round, should the order have a cycle
            visit = self._next.get(visit) if visit is not None else None
            if visit is None:
                return
            yield visit[1]
