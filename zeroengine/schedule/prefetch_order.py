"""The order in which units are needed, learned from one forward or backward for the next."""

from __future__ import annotations

from collections.abc import Iterator
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


class PrefetchOrder:
    """Predicts which units come next: the units that followed the same use in the previous pass.

    A wrong prediction costs time and never correctness.
    """

    def __init__(self) -> None:
        self._next: dict[Use, Use] = {}
        # The number of uses of each unit in this pass.
        self._num_uses: dict[int, int] = {}
        self._last: Use | None = None

    @property
    def last(self) -> int | None:
        """The unit that was used last in this pass, or None before the first use."""
        return None if self._last is None else self._last[1]

    def start_pass(self) -> None:
        """Begin a forward or a backward."""
        # The order learned from earlier passes stays, because this pass is likely to repeat it.
        self._last = None
        self._num_uses.clear()

    def end_pass(self) -> None:
        """End a forward or a backward: nothing follows the last use."""
        if self._last is not None:
            # In a longer earlier pass more may have followed. Prefetching it now would hold memory until the next pass.
            self._next.pop(self._last, None)

    def note_use(self, unit: int, in_backward: bool) -> None:
        """Record that ``unit`` is needed now. Consecutive uses of one unit count once."""
        if self.last == unit:
            return
        self._num_uses[unit] = self._num_uses.get(unit, 0) + 1
        use = (in_backward, unit, self._num_uses[unit])
        if self._last is not None:
            self._next[self._last] = use
        self._last = use

    def upcoming(self) -> Iterator[int]:
        """Yield the units that followed the last use, in order. A unit may come several times."""
        use = self._last
        # The order may have a cycle, so stop after one round.
        for _ in range(len(self._next)):
            use = self._next.get(use) if use is not None else None
            if use is None:
                return
            yield use[1]
