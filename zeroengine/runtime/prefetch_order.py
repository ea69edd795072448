"""The order in which units are needed, learned from one forward or backward for the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from zeroengine.config.zero import ZeroOptimization


class Gatherable(Protocol):
    """What prefetching needs to know of a unit, so that the planner can play a pass without memory."""

    @property
    def numel(self) -> int:
        """The elements of the full buffer."""

    @property
    def is_released(self) -> bool:
        """Whether the unit is neither gathered nor being gathered."""


class PrefetchLimits(NamedTuple):
    """How far units are gathered ahead of use.

    Neither stops the very next unit: without that, every gather of a large unit would be waited for.

    Attributes:
        numel: Elements that may be gathered ahead of use. 0: nothing is.
        max_live_numel: Elements of releasable units up to which prefetching continues.
    """

    numel: int
    max_live_numel: int

    @classmethod
    def of_settings(cls, zero: ZeroOptimization, *, overlaps: bool, reads_shards: bool) -> PrefetchLimits:
        """Return the limits of a configuration.

        Args:
            zero: The section of the configuration.
            overlaps: Whether collectives overlap the computation (``Transport.overlaps``).
            reads_shards: Whether shards are offloaded.
        """
        # A gather that does not overlap the computation gains nothing from an early start, and would hold memory for
        # longer. A read from the host's memory or a disk overlaps on every transport.
        prefetches = zero.overlap_comm and (overlaps or reads_shards)
        return cls(zero.prefetch_bucket_size if prefetches else 0, zero.max_live_parameters)


U = TypeVar("U", bound=Gatherable)
# Whether it is in a backward, the unit, and how many times this pass has used the unit. A unit
# that is used several times may have a different successor each time.
Use = tuple[bool, U, int]


class PrefetchOrder(Generic[U]):
    """Predicts which units come next: the units that followed the same use in the previous pass.

    A wrong prediction costs time and never correctness.

    Attributes:
        live_numel_refused: The elements that would have been live at the last unit that ``max_live_numel`` alone kept
            from being prefetched. 0: there was none.
    """

    def __init__(self) -> None:
        self._next: dict[Use[U], Use[U]] = {}
        # The number of uses of each unit in this pass.
        self._num_uses: dict[U, int] = {}
        self._last: Use[U] | None = None
        self.live_numel_refused = 0

    @property
    def last(self) -> U | None:
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

    def note_use(self, unit: U, in_backward: bool) -> None:
        """Record that ``unit`` is needed now. Consecutive uses of one unit count once."""
        if self.last is unit:
            return
        self._num_uses[unit] = self._num_uses.get(unit, 0) + 1
        use = (in_backward, unit, self._num_uses[unit])
        if self._last is not None:
            self._next[self._last] = use
        self._last = use

    def upcoming(self) -> Iterator[U]:
        """Yield the units that followed the last use, in order. A unit may come several times."""
        use = self._last
        # The order may have a cycle, so stop after one round.
        for _ in range(len(self._next)):
            use = self._next.get(use) if use is not None else None
            if use is None:
                return
            yield use[1]

    def to_prefetch(self, limits: PrefetchLimits, live_numel: int) -> Iterator[U]:
        """Yield the released units among the next ones, up to the limits. The caller starts each before the next.

        Args:
            limits: How far to gather ahead.
            live_numel: Elements of releasable units that are gathered now.
        """
        ahead: set[U] = set()
        ahead_numel = 0
        for unit in self.upcoming() if limits.numel else ():
            if unit not in ahead:
                ahead.add(unit)
                ahead_numel += unit.numel
            live_numel += unit.numel if unit.is_released else 0
            is_next = len(ahead) == 1
            if not is_next and ahead_numel > limits.numel:
                return
            if not is_next and live_numel > limits.max_live_numel:
                self.live_numel_refused = live_numel
                return
            if unit.is_released:
                yield unit
