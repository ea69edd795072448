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

    Where passes follow one another, such as those of the tokens of a generation, the first units of the next one come
    after the last ones of a pass. A wrong prediction costs time and never correctness.

    Args:
        limit: ``PrefetchLimits.numel``.
        numel_of: Returns the elements of a unit.
        guess: The units that the first pass is taken to use, in order.
    """

    def __init__(self, limit: int, numel_of: Callable[[int], int], guess: Sequence[int] = ()) -> None:
        self._limit, self._numel_of = limit, numel_of
        self._next: dict[Use, Use] = {(False, unit, 1): (False, follower, 1) for unit, follower in pairwise(guess)}
        # Whether another pass is likely to follow at once. By the last use of a pass: the first use of the pass
        # that followed it. A part of the model may be called by itself, so passes take turns.
        self._is_followed = False
        self._next_pass: dict[Use, Use] = {}
        # By use: what may be gathered ahead there, as long as the two above stay as they are.
        self._upcoming: dict[Use | None, Upcoming] = {}
        # The number of uses of each unit in this pass.
        self._num_uses: dict[int, int] = {}
        # The first and the last use of this pass, and the last one of the pass before.
        self._first: Use | None = None
        self._last: Use | None = None
        self._last_before: Use | None = None

    @property
    def last(self) -> int | None:
        """The unit that was used last in this pass, or None before the first use."""
        return None if self._last is None else self._last[1]

    def start_pass(self, *, is_followed: bool = False) -> None:
        """Begin a forward or a backward. ``is_followed``: whether another pass is likely to follow at once."""
        # The order learned from earlier passes stays, because this pass is likely to repeat it.
        self._last_before = self._last if is_followed and self._is_followed else None
        self._first = self._last = None
        if is_followed is not self._is_followed:
            self._is_followed = is_followed
            self._upcoming.clear()
        self._num_uses.clear()

    def end_pass(self) -> None:
        """End a forward or a backward: nothing follows the last use in it."""
        # A single use says nothing of what follows it in other passes.
        if self._first is None or self._last is None or self._first == self._last:
            return
        # In a longer earlier pass more may have followed. Prefetching it now would hold memory until the next pass.
        if self._next.pop(self._last, None) is not None:
            self._upcoming.clear()
        if self._is_followed and self._last not in self._next_pass:
            self._learn(self._next_pass, self._last, self._first)

    def note_use(self, unit: int, in_backward: bool) -> None:
        """Record that ``unit`` is needed now. Consecutive uses of one unit count once."""
        if self.last == unit:
            return
        self._num_uses[unit] = self._num_uses.get(unit, 0) + 1
        use = (in_backward, unit, self._num_uses[unit])
        if self._last is not None:
            if self._next.get(self._last) != use:
                self._learn(self._next, self._last, use)
        elif self._last_before != use:
            self._learn(self._next_pass, self._last_before, use)
        self._first, self._last = self._first or use, use

    def _learn(self, following: dict[Use, Use], use: Use | None, follower: Use) -> None:
        if use is not None and following.get(use) != follower:
            following[use] = follower
            self._upcoming.clear()

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
        for _ in range(len(self._next) + len(self._next_pass) if self._limit else 0):
            if use is None or (use := self._following(use)) is None:
                break
            if use[1] not in ahead:
                ahead.add(use[1])
                ahead_numel += self._numel_of(use[1])
            if len(ahead) > 1 and ahead_numel > self._limit:
                break
            units.append(use[1])
            num_next += len(ahead) == 1
        return Upcoming(tuple(units), num_next)

    def _following(self, use: Use) -> Use | None:
        return self._next.get(use) or (self._next_pass.get(use) if self._is_followed else None)
