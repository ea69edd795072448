"""The order in which units are needed, learned from one forward or backward for the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple


class PrefetchLimits(NamedTuple):
    """How far units are gathered ahead of use.

    Neither stops the very next unit: without that, every gather of a large unit would be waited for.

    Attributes:
        numel: Elements that may be gathered ahead of use. 0: nothing is.
        max_live_numel: Elements of releasable units up to which prefetching continues.
    """

    numel: int
    max_live_numel: int


# Whether it is in a backward, the unit, and how many times this pass has used the unit. A unit that is used several
# times may have a different successor each time.
Use = tuple[bool, int, int]


# The longest list of upcoming units that is kept for a use.
MAX_KEPT_UNITS = 256


class Upcoming(NamedTuple):
    """The units that may be gathered ahead of use, in order. A unit may come several times.

    Attributes:
        units: The units.
        num_next: How many of them, from the first on, are the very next unit.
    """

    units: tuple[int, ...]
    num_next: int


class PrefetchOrder:
    """Predicts which units come next: the units that followed the same use in the previous pass.

    A pass that repeats, such as each token's of a generation, is followed by its own first units. A wrong prediction
    costs time and never correctness.

    Args:
        limit: ``PrefetchLimits.numel``.
        numel_of: Returns the elements of a unit.
        guess: The units that the first pass is taken to use, in order.
    """

    def __init__(self, limit: int, numel_of: Callable[[int], int], guess: Sequence[int] = ()) -> None:
        self._limit, self._numel_of = limit, numel_of
        self._next: dict[Use, Use] = {(False, unit, 1): (False, follower, 1) for unit, follower in pairwise(guess)}
        # Whether another pass like this one is likely to follow, and the first and the last use of such a pass.
        self._repeats = False
        self._first: Use | None = None
        self._end: Use | None = None
        # By use: what may be gathered ahead there, as long as ``_next`` stays as it is.
        self._upcoming: dict[Use | None, Upcoming] = {}
        # The number of uses of each unit in this pass.
        self._num_uses: dict[int, int] = {}
        self._last: Use | None = None

    @property
    def last(self) -> int | None:
        """The unit that was used last in this pass, or None before the first use."""
        return None if self._last is None else self._last[1]

    def start_pass(self, *, repeats: bool = False) -> None:
        """Begin a forward or a backward. ``repeats``: whether another pass like it is likely to follow."""
        # The order learned from earlier passes stays, because this pass is likely to repeat it.
        self._last = None
        if repeats is not self._repeats:
            self._repeats = repeats
            self._upcoming.clear()
        self._num_uses.clear()

    def end_pass(self) -> None:
        """End a forward or a backward: nothing follows the last use, or the pass begins again."""
        if self._last is not None:
            # In a longer earlier pass more may have followed. Prefetching it now would hold memory until the next pass.
            if self._next.pop(self._last, None) is not None:
                self._upcoming.clear()
            if self._repeats and self._end != self._last:
                self._end = self._last
                self._upcoming.clear()

    def note_use(self, unit: int, in_backward: bool) -> None:
        """Record that ``unit`` is needed now. Consecutive uses of one unit count once."""
        if self.last == unit:
            return
        self._num_uses[unit] = self._num_uses.get(unit, 0) + 1
        use = (in_backward, unit, self._num_uses[unit])
        if self._repeats and self._last is None and self._first != use:
            self._first = use
            self._upcoming.clear()
        if self._last is not None and self._next.get(self._last) != use:
            self._next[self._last] = use
            self._upcoming.clear()
        self._last = use

    def upcoming(self) -> Upcoming:
        """Return the units that followed the last use, as far as they may be gathered ahead."""
        upcoming = self._upcoming.get(self._last)
        if upcoming is None:
            upcoming = self._find_upcoming()
            # Of very many small units the lists would fill the memory.
            if len(upcoming.units) <= MAX_KEPT_UNITS:
                self._upcoming[self._last] = upcoming
        return upcoming

    def _find_upcoming(self) -> Upcoming:
        use, units, num_next = self._last, list[int](), 0
        ahead, ahead_numel = set[int](), 0
        # The order may have a cycle, so stop after one round.
        for _ in range(len(self._next) if self._limit else 0):
            if use is None or (use := self._next.get(use) or self._first_again(use)) is None:
                break
            if use[1] not in ahead:
                ahead.add(use[1])
                ahead_numel += self._numel_of(use[1])
            if len(ahead) > 1 and ahead_numel > self._limit:
                break
            units.append(use[1])
            num_next += len(ahead) == 1
        return Upcoming(tuple(units), num_next)

    def _first_again(self, use: Use) -> Use | None:
        """Return the first use of the next pass, if this one repeats and ``use`` is its last."""
        return self._first if self._repeats and use == self._end else None
