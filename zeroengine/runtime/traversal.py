"""Where the backwards are that autograd runs now: gathers what they need, in the order of the logs, and releases it.

[Note: Recomputations]
A *reentrant* checkpoint runs its modules without gradients in forward, which leaves one recomputed visit of all their
units. Its backward runs them again, with gradients, and then a backward of its own through them. That recomputation has
a log, and the nested backward a cursor. The cursor of the outer backward is at the recomputed visit meanwhile, which is
over when the nested backward ends.

A *non-reentrant* checkpoint leaves the visits of an ordinary forward. When its backward first reads a saved tensor, it
runs its modules again. That gathers their units in the order of a forward, and keeps them until the visits are over.
When that comes may depend on which items of a list this rank has called. So a module that holds a list, inside such
a checkpoint, keeps all items from the moment at which the backward comes to it.

[Note: Who calls whom]
``Forward`` calls ``expect``, which registers ``_reach`` on outputs. It moves a cursor, which gathers and releases here.
What is over goes to ``Backward.reduce_if_over``, and from there to the reducer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch

from zeroengine.runtime.autograd_hooks import WeakMethod, register_hook_first
from zeroengine.runtime.backward_calls import is_autograd_grad, is_in_recomputation, is_outermost_backward
from zeroengine.runtime.cursor import Cursor
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.visit_log import EARLIEST, Place, Visit, VisitLog, VisitLogs
from zeroengine.utils.torch_internals import current_autograd_node, current_graph_task_id, node_number, queue_callback


class GradientSide(Protocol):
    """What a traversal calls of ``Backward``, which owns it."""

    @property
    def is_producing_gradients(self) -> bool:
        """Whether the backward that runs now accumulates gradients."""

    def note_begin(self, cursor: Cursor) -> None:
        """Note that autograd has begun the backward of ``cursor``."""

    def note_end(self, cursor: Cursor) -> None:
        """Note that autograd has ended the backward of ``cursor``, which has not raised."""

    def reduce_if_over(self, units: Iterable[Unit]) -> None:
        """Let those of ``units`` be reduced that the backwards use no more."""

    def advance(self) -> None:
        """Let units be reduced of which no visit is pending any more."""


class Traversal:
    """The backwards that autograd runs, and where they are in the logs.

    Args:
        units_of_items: The units of items of lists, which are released after each visit.
        gatherer: Gathers units.
        backward: Owns this object, and lets units be reduced.
        is_in_forward: Whether a forward of the whole model is in progress.

    Attributes:
        logs: The logs of forwards.
        cursors: The backwards that autograd runs, the innermost last.
    """

    def __init__(
        self, units_of_items: set[Unit], gatherer: Gatherer, backward: GradientSide, is_in_forward: Callable[[], bool]
    ) -> None:
        self._units_of_items, self._gatherer, self._backward = units_of_items, gatherer, backward
        self._is_in_forward = is_in_forward
        self.logs = VisitLogs(WeakMethod(self, Traversal.follow_backward))
        self.cursors: list[Cursor] = []
        # The logs that a backward with ``create_graph`` has come to. A thread of autograd may have made what it added.
        self._extended_logs: set[VisitLog] = set()

    def expect(self, log: VisitLog, visit: Visit, outputs: Iterable[torch.Tensor]) -> None:
        """Let autograd report when it comes to ``outputs``, which ``visit`` of ``log`` has returned."""
        for tensor in outputs:
            # Any of the outputs may get its gradient first, and some may get none. So each output carries the hook. A
            # module may return what a module inside of it has returned. The backward comes to the outer one first.
            register_hook_first(tensor, WeakMethod(self, Traversal._reach, log, visit))

    @property
    def is_running(self) -> bool:
        """Whether autograd runs a backward, as far as ``follow_backward`` has noticed."""
        return bool(self.cursors)

    def follow_backward(self) -> bool:
        """Return whether autograd is running a backward. Begin to follow it, once."""
        number = current_graph_task_id()
        if number < 0:
            return False
        if any(cursor.number == number for cursor in reversed(self.cursors)):
            return True
        is_outermost = is_outermost_backward()
        if self.cursors and is_outermost:
            # An earlier backward has raised.
            self.abandon()
        is_first = not self.cursors
        if is_first:
            self._gatherer.begin_pass()
        contained, unknown = self.logs.of_backward() if is_first else ([], [])
        accumulates = not is_autograd_grad()
        cursor = Cursor(contained, unknown, number=number, is_outermost=is_outermost, accumulates=accumulates)
        self.cursors.append(cursor)
        # Autograd drops the callback if the backward raises. ``abandon`` then forgets it.
        queue_callback(partial(self._end, cursor))
        self._backward.note_begin(cursor)
        return True

    def current(self) -> Cursor:
        """Return the backward whose hook calls this. ``follow_backward`` has noticed it."""
        number = current_graph_task_id()
        return next((cursor for cursor in reversed(self.cursors) if cursor.number == number), self.cursors[-1])

    def _reach(self, log: VisitLog, visit: Visit) -> None:
        """Go to ``visit``, to which autograd has come."""
        if not self.follow_backward():
            return
        log.note_run()
        if torch.is_grad_enabled():
            self._extended_logs.add(log)
        cursor = self._cursor_of(log)
        cursor.join(log)
        self._move(cursor, visit.place)
        if not cursor.has_reached(visit):
            self._gather(visit)
            cursor.reach(visit)
            self._backward.advance()

    def move_to_current_node(self) -> None:
        """Go to the node that autograd runs, which uses a unit without a hook."""
        node = current_autograd_node()
        # Nodes of a recomputation may be numbered by another thread.
        if self.cursors and node is not None and self.current() is self.cursors[0]:
            self._move(self.cursors[0], Place(node_number(node), sys.maxsize))

    def move_before(self, log: VisitLog, visit: Visit) -> None:
        """Go to the node that was made before ``visit`` of ``log`` began."""
        if self.follow_backward():
            cursor = self._cursor_of(log)
            if log in cursor.logs:
                self._move(cursor, Place(visit.first_node - 1, sys.maxsize))

    def _cursor_of(self, log: VisitLog) -> Cursor:
        return self.current() if log.is_recomputation else self.cursors[0]

    def recompute(self, units: Sequence[Unit], *, is_nested: bool) -> VisitLog:
        """Go to the visit that is recomputed by a forward inside the backward. Return the log of the recomputation.

        Args:
            units: What the forward needs, before it is gathered.
            is_nested: Whether it is inside another forward that the backward runs.
        """
        cursor = self.current()
        if cursor.recomputation is None or not (is_nested or cursor.is_recomputing(units)):
            cursor.recomputation = VisitLog(is_recomputation=True)
            # Without gradients one checkpoint runs another one forward again. The innermost backward that is to
            # recompute the units does so now.
            is_reentrant = torch.is_grad_enabled() and not is_in_recomputation()
            for outer in reversed(self.cursors) if is_reentrant else ():
                visit = outer.recomputed_visit(units)
                if visit is not None:
                    self._move(outer, visit.place)
                    outer.reach(visit)
                    break
        return cursor.recomputation

    def _move(self, cursor: Cursor, place: Place) -> None:
        """Move ``cursor`` to ``place``: gather what other ranks gather on the way, and release what is over."""
        passes_over = cursor.accumulates and self._backward.is_producing_gradients
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
            self._backward.advance()
        self._leave(cursor.leave(place.node_number))

    def _gather(self, visit: Visit) -> None:
        for unit in visit.units:
            # A module that holds a list keeps its other units, so it does not matter when those inside of it need them.
            if not self._is_active(unit):
                self._gatherer.gather_and_prefetch(unit, in_backward=True)

    def _leave(self, visits: Iterable[Visit]) -> None:
        """Release the units of visits that are over, and let them be reduced."""
        units = list(dict.fromkeys(unit for visit in visits for unit in visit.units))
        for unit in units:
            # A unit that further visits need stays gathered. Items of lists come too often for that.
            is_needed = self._is_next(unit) if unit in self._units_of_items else self.is_pending(unit)
            if not (is_needed or self._is_active(unit)):
                self._gatherer.release(unit)
                self._gatherer.deferred_frees.retry()
        if units:
            self._backward.reduce_if_over(unit for unit in units if unit.trainable)

    def _end(self, cursor: Cursor) -> None:
        """End a backward that has not raised. Backwards inside of it that are still listed have raised."""
        if cursor in self.cursors:
            self._move(cursor, EARLIEST)
            del self.cursors[self.cursors.index(cursor) :]
            if not self.cursors:
                self._end_pass()
            elif cursor.accumulates:
                self._leave(self.cursors[-1].leave_recomputed())
        self._backward.note_end(cursor)

    def abandon(self) -> None:
        """Forget backwards that raised. Call this where none can be in progress."""
        if self.cursors:
            self.cursors.clear()
            self._end_pass()

    def _end_pass(self) -> None:
        for log in self._extended_logs:
            log.has_one_order = False
        self._extended_logs.clear()
        # A backward inside a forward, such as torch.autograd.grad, leaves this to the end of the forward.
        if not self._is_in_forward():
            self._gatherer.release_unhooked_uses()
        self._gatherer.end_backward_pass()
        if not self._is_in_forward():
            self._gatherer.deferred_frees.warn_of_memory()

    def is_pending(self, unit: Unit) -> bool:
        """Return whether visits of ``unit`` are known to come."""
        return any(cursor.is_pending(unit) for cursor in self.cursors)

    def _is_next(self, unit: Unit) -> bool:
        return any(cursor.needs_next(unit) for cursor in self.cursors)

    def _is_active(self, unit: Unit) -> bool:
        return any(cursor.is_active(unit) for cursor in self.cursors)

    def is_over(self, unit: Unit) -> bool:
        """Return whether the backwards use ``unit`` no more."""
        return all(cursor.is_over(unit) for cursor in self.cursors)
