"""Where the backwards are that autograd runs now: what they gather, in the order of the logs, release, and reduce.

[Note: Recomputations]
A *reentrant* checkpoint runs its modules without gradients in forward, which leaves one recomputed visit of all their
units. Its backward runs them again, with gradients, and then a backward of its own through them. That recomputation has
a log, and the nested backward a cursor. The cursor of the outer backward is at the recomputed visit meanwhile, which is
over when the nested backward ends.

A *non-reentrant* checkpoint leaves the visits of an ordinary forward. When its backward first reads a saved tensor, it
runs its modules again. That gathers their units in the order of a forward, and keeps them until the visits are over.
When that comes may depend on which items of a list this rank has called. So a module that holds a list, inside such
a checkpoint, keeps all items from the moment at which the backward comes to it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from zeroengine.schedule.cursor import Cursor
from zeroengine.schedule.events import BackwardBegan, GradientsArrived, Moment, Reached, ReachedInputs
from zeroengine.schedule.reduce_order import ReduceOrder
from zeroengine.schedule.residency import GatherState, Residency, UnitFacts
from zeroengine.schedule.visits import EARLIEST, Place, Visit, VisitLog, VisitLogs


class Backwards:
    """The backwards that autograd runs, and where they are in the logs.

    Args:
        units: All units, by number.
        logs: The logs of forwards.
        residency: The units that are gathered.
        reduce_order: The gradients that are to come.

    Attributes:
        cursors: The backwards that autograd runs, the innermost last.
    """

    def __init__(
        self, units: Sequence[UnitFacts], logs: VisitLogs, residency: Residency, reduce_order: ReduceOrder
    ) -> None:
        self._units, self._logs, self._residency, self._reduce_order = units, logs, residency, reduce_order
        self._units_with_visits = [
            number for number, unit in enumerate(units) if unit.is_trained and unit.is_releasable
        ]
        self.cursors: list[Cursor] = []
        # The logs that a backward with ``create_graph`` has come to. A thread of autograd may have made what it added.
        self._extended_logs: set[VisitLog] = set()

    @property
    def is_running(self) -> bool:
        """Whether autograd runs a backward, as far as events have told."""
        return bool(self.cursors)

    def is_known(self, task: int) -> bool:
        """Return whether the backward of this number is in progress."""
        for cursor in reversed(self.cursors):
            if cursor.number == task:
                return True
        return False

    def is_first(self, task: int) -> bool:
        """Return whether the backward of this number is the outermost one that is known."""
        return bool(self.cursors) and self.cursors[0].number == task

    def begin(self, event: BackwardBegan) -> None:
        """Follow a backward that autograd runs."""
        if self.cursors and event.is_outermost:
            # An earlier backward has raised.
            self.abandon()
        is_first = not self.cursors
        if is_first:
            self._residency.begin_pass()
        contained = event.contained if is_first else ()
        unknown = self._logs.unknown(contained) if is_first else ()
        task, is_outermost, accumulates = event.task, event.is_outermost, event.accumulates
        self.cursors.append(Cursor(contained, unknown, number=task, is_outermost=is_outermost, accumulates=accumulates))

    def current(self, task: int) -> Cursor:
        """Return the backward of this number, or the innermost one."""
        for cursor in reversed(self.cursors):
            if cursor.number == task:
                return cursor
        return self.cursors[-1]

    def reach(self, event: Reached) -> None:
        """Go to the visit that autograd has come to."""
        log, visit = event.log, event.visit
        log.note_run(keeps_graph=event.keeps_graph)
        if event.extends_graph:
            self._extended_logs.add(log)
        cursor = self._cursor_of(log, event.task)
        cursor.join(log)
        self._move(cursor, visit.place)
        if not cursor.has_reached(visit):
            self._gather(visit)
            cursor.reach(visit)
            self.advance()

    def reach_inputs(self, event: ReachedInputs) -> None:
        """Go to the node that was made before the visit began."""
        cursor = self._cursor_of(event.log, event.task)
        if event.log in cursor.logs:
            self._move(cursor, Place(event.visit.first_node - 1, sys.maxsize))

    def move_to_node(self, task: int, node: int | None) -> None:
        """Go to a node that autograd runs, which uses a unit without a hook."""
        # Nodes of a recomputation may be numbered by another thread.
        if self.cursors and node is not None and self.current(task) is self.cursors[0]:
            self._move(self.cursors[0], Place(node, sys.maxsize))

    def _cursor_of(self, log: VisitLog, task: int) -> Cursor:
        return self.current(task) if log.is_recomputation else self.cursors[0]

    def recompute(self, units: Sequence[int], moment: Moment, *, is_nested: bool) -> VisitLog:
        """Go to the visit that is recomputed by a forward inside the backward. Return the log of the recomputation.

        Args:
            units: What the forward needs, before it is gathered.
            moment: Now.
            is_nested: Whether it is inside another forward that the backward runs.
        """
        cursor = self.current(moment.task)
        if cursor.recomputation is None or not (is_nested or cursor.is_recomputing(units)):
            cursor.recomputation = VisitLog(moment.thread, is_recomputation=True)
            # Without gradients one checkpoint runs another one forward again. The innermost backward that is to
            # recompute the units does so now.
            for outer in reversed(self.cursors) if moment.recomputes_by_node else ():
                visit = outer.recomputed_visit(units)
                if visit is not None:
                    self._move(outer, visit.place)
                    outer.reach(visit)
                    break
        return cursor.recomputation

    def _move(self, cursor: Cursor, place: Place) -> None:
        """Move ``cursor`` to ``place``: gather what other ranks gather on the way, and release what is over."""
        passes_over = cursor.accumulates and self._reduce_order.is_producing
        for visit in cursor.passed_over(place):
            if not passes_over:
                cursor.drop(visit)
                continue
            # It is pending until its units are gathered, so that they are reduced after that, as on other ranks.
            self._leave(cursor.leave(visit.place.node_number))
            if not visit.is_recomputed:
                self._gather(visit)
            cursor.drop(visit)
            self._leave([visit])
            self.advance()
        self._leave(cursor.leave(place.node_number))

    def _gather(self, visit: Visit) -> None:
        for unit in visit.units if visit.needs_values else ():
            # A module that holds a list keeps its other units, so it does not matter when those inside of it need them.
            if not (self._is_active(unit) and self._residency.states[unit] is GatherState.GATHERED):
                self._residency.gather_and_prefetch(unit, in_backward=True)

    def _leave(self, visits: Iterable[Visit]) -> None:
        """Release the units of visits that are over, and let them be reduced."""
        units = list(dict.fromkeys(unit for visit in visits for unit in visit.units))
        for unit in units:
            # A unit that further visits need stays gathered. Items of lists come too often for that.
            if self._units[unit].is_item:
                is_needed = self._is_next(unit) or self._is_active(unit)
            else:
                is_needed = self._needs_values(unit)
            if not is_needed:
                self._residency.release(unit)
        if units:
            self._reduce_if_over(units)

    def end(self, task: int) -> None:
        """End a backward that has not raised. Backwards inside of it that are still listed have raised."""
        cursor = next((cursor for cursor in self.cursors if cursor.number == task), None)
        if cursor is None:
            return
        self._move(cursor, EARLIEST)
        del self.cursors[self.cursors.index(cursor) :]
        if not self.cursors:
            self._end_pass()
        elif cursor.accumulates:
            self._leave(self.cursors[-1].leave_recomputed())

    def abandon(self) -> None:
        """Forget backwards that raised. None can be in progress."""
        if self.cursors:
            self.cursors.clear()
            self._end_pass()

    def _end_pass(self) -> None:
        for log in self._extended_logs:
            log.has_one_order = False
        self._extended_logs.clear()
        # A backward inside a forward, such as torch.autograd.grad, leaves this to the end of the forward.
        if not self._residency.num_forwards:
            self._residency.release_all_unhooked()
        self._residency.end_backward_pass()

    # -- reduces ----------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """Let gradients accumulate, and units be reduced that this backward does not use."""
        self._reduce_order.is_producing = True
        if self.cursors:
            self._reduce_if_over(self._units_with_visits)

    def count_gradients(self, event: GradientsArrived) -> None:
        """Count gradients that have arrived, and let their unit be reduced if it has all."""
        if self._reduce_order.count(event.unit, event.params):
            self._note_complete(event.unit)
            self.advance()

    def advance(self) -> None:
        """Let units be reduced of which no visit is pending any more."""
        if self._reduce_order.is_producing:
            self._reduce_order.advance(self.is_pending)

    def _reduce_if_over(self, units: Iterable[int]) -> None:
        """Let those of ``units`` be reduced that the backwards use no more."""
        if not self._reduce_order.is_producing:
            return
        order = self._reduce_order
        closed = [unit for unit in units if order.lacks(unit) and self._is_over(unit)]
        for unit in closed:
            order.complete_with_zeros(unit)
        for unit in closed:
            self._note_complete(unit)
        if closed:
            self.advance()

    def _note_complete(self, unit: int) -> None:
        # A forward in progress, such as a recomputation, may use the unit again before it ends.
        if not self._residency.num_forwards:
            self._residency.release_unhooked(unit)

    # -- units ------------------------------------------------------------------------------------

    def is_pending(self, unit: int) -> bool:
        """Return whether visits of ``unit`` are known to come."""
        # Mostly there is one cursor, and a generator takes longer than the question.
        for cursor in self.cursors:
            if cursor.is_pending(unit):
                return True
        return False

    def _is_next(self, unit: int) -> bool:
        return any(cursor.needs_next(unit) for cursor in self.cursors)

    def _needs_values(self, unit: int) -> bool:
        for cursor in self.cursors:
            if cursor.needs_values(unit):
                return True
        return False

    def _is_active(self, unit: int) -> bool:
        for cursor in self.cursors:
            if cursor.is_active(unit):
                return True
        return False

    def _is_over(self, unit: int) -> bool:
        """Return whether the backwards use ``unit`` no more."""
        for cursor in self.cursors:
            if not cursor.is_over(unit):
                return False
        return True
