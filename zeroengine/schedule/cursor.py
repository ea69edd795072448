"""Where one backward is in the logs that it contains. See "One order of collectives" in ``visits.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from zeroengine.schedule.visits import Place, Visit, VisitLog


class Cursor:
    """One backward that autograd runs, and its position, which moves towards earlier visits.

    Args:
        contained: The logs that the backward contains.
        unknown: The logs that it may contain. It contains them once it has come to a visit of them.
        number: The number that autograd gave to the backward.
        is_outermost: Whether it is not nested in another one.
        accumulates: Whether it accumulates gradients, unlike ``torch.autograd.grad``.

    Attributes:
        logs: The logs that it is known to contain.
        recomputation: The log of the recomputation in progress or the last one, if there was any.
    """

    def __init__(
        self,
        contained: Iterable[VisitLog] = (),
        unknown: Iterable[VisitLog] = (),
        *,
        number: int = 0,
        is_outermost: bool = True,
        accumulates: bool = True,
    ) -> None:
        self.number, self.is_outermost, self.accumulates = number, is_outermost, accumulates
        self.recomputation: VisitLog | None = None
        # Those of logs with one order that are pending, the next one last.
        self._pending: list[Visit] = []
        # Those that the cursor has come to, and that are not over.
        self._active: list[Visit] = []
        self._reached: set[Visit] = set()
        self.logs: set[VisitLog] = set()
        self._unknown = set(unknown)
        self._num_pending: dict[int, int] = defaultdict(int)
        self._num_active: dict[int, int] = defaultdict(int)
        # The visits that are pending or active, and need values.
        self._num_needing: dict[int, int] = defaultdict(int)
        # Units of which nothing shows when they are over.
        self._untracked: set[int] = set()
        for log in contained:
            self.join(log)

    def join(self, log: VisitLog) -> None:
        """Note that the backward contains ``log``."""
        if log in self.logs:
            return
        is_first = not self.logs
        self.logs.add(log)
        self._unknown.discard(log)
        self._untracked |= log.untracked
        # Each thread counts its nodes for itself.
        if not log.has_one_order or (not is_first and any(other.thread != log.thread for other in self.logs)):
            self._untracked.update(unit for visit in log.visits for unit in visit.units)
            return
        self._pending = sorted([*self._pending, *log.visits], key=lambda visit: visit.place)
        for visit in log.visits:
            for unit in visit.units:
                self._num_pending[unit] += 1
                self._num_needing[unit] += visit.needs_values

    def passed_over(self, place: Place) -> Iterator[Visit]:
        """Yield the pending visits at later places than ``place``, the latest first. The caller drops each of them."""
        while self._pending and self._pending[-1].place > place:
            yield self._pending[-1]

    def drop(self, visit: Visit) -> None:
        """Note that the next pending visit is over, because it was passed over."""
        assert self._pending[-1] is visit
        self._pending.pop()
        for unit in visit.units:
            self._num_pending[unit] -= 1
            self._num_needing[unit] -= visit.needs_values

    def needs_next(self, unit: int) -> bool:
        """Return whether the next pending visit needs ``unit``."""
        return bool(self._pending) and unit in self._pending[-1].units

    def has_reached(self, visit: Visit) -> bool:
        """Return whether autograd has come to ``visit``."""
        return visit in self._reached

    def reach(self, visit: Visit) -> None:
        """Note that autograd has come to ``visit``, behind which nothing is pending."""
        self._reached.add(visit)
        if self._pending and self._pending[-1] is visit:
            self.drop(visit)
        self._active.append(visit)
        for unit in visit.units:
            self._num_active[unit] += 1
            self._num_needing[unit] += visit.needs_values

    def leave(self, node_number: int) -> list[Visit]:
        """Return the visits that are over when autograd comes to a node, and forget them."""
        over = [visit for visit in self._active if visit.first_node > node_number and not visit.is_recomputed]
        return self._leave(over)

    def leave_recomputed(self) -> list[Visit]:
        """Return the recomputed visits that are over, because the backward of the recomputation has ended."""
        return self._leave([visit for visit in self._active if visit.is_recomputed])

    def _leave(self, over: list[Visit]) -> list[Visit]:
        for visit in over:
            self._active.remove(visit)
            for unit in visit.units:
                self._num_active[unit] -= 1
                self._num_needing[unit] -= visit.needs_values
        return over

    def recomputed_visit(self, units: Sequence[int]) -> Visit | None:
        """Return the next pending visit that is recomputed and needs one of ``units``."""
        wanted = set(units)
        recomputed = (visit for visit in reversed(self._pending) if visit.is_recomputed)
        return next((visit for visit in recomputed if not wanted.isdisjoint(visit.units)), None)

    def is_recomputing(self, units: Sequence[int]) -> bool:
        """Return whether a recomputed visit that the cursor has come to needs one of ``units``."""
        return any(visit.is_recomputed and not set(units).isdisjoint(visit.units) for visit in self._active)

    def is_pending(self, unit: int) -> bool:
        """Return whether visits of ``unit`` are known to come."""
        return self._num_pending[unit] > 0

    def is_active(self, unit: int) -> bool:
        """Return whether a visit of ``unit`` is in progress."""
        return self._num_active[unit] > 0

    def needs_values(self, unit: int) -> bool:
        """Return whether a visit that is pending or in progress needs the values of ``unit``."""
        return self._num_needing[unit] > 0

    def is_over(self, unit: int) -> bool:
        """Return whether this backward uses ``unit`` no more."""
        if self.is_pending(unit) or self.is_active(unit) or unit in self._untracked:
            return False
        return not any(
            unit in log.untracked or any(unit in visit.units for visit in log.visits) for log in self._unknown
        )
