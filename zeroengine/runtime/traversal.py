"""Where the backwards are that autograd runs now: gathers what they need, in the order of the logs, and releases it.

[Note: Recomputations]
A *reentrant* checkpoint runs its modules without gradients in forward, which leaves one recomputed visit of all their
units. Its backward runs them again, with gradients, and then a backward of its own through them. That recomputation has
a log, and the nested backward a cursor. The cursor of the outer backward is at the recomputed visit meanwhile, which is
over when the nested backward ends.

A *non-reentrant* checkpoint leaves the visits of an ordinary forward. When its backward first reads a saved tensor, it
runs its modules again. That gathers their units in the order of a forward, and keeps them until the visits are over.
When that comes may depend on which elements of a list this rank has called. So a module that holds a list, inside such
a checkpoint, keeps all elements from the moment at which the backward comes to it.

[Note: Who calls whom]
``Forward`` registers ``_reach`` on outputs. It moves a cursor, which gathers and releases here. What is over goes to
``Backward.reduce_if_over``, and from there to the reducer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch

from zeroengine.runtime.autograd_hooks import WeakMethod, queue_callback, register_hook_first
from zeroengine.runtime.backward_calls import is_autograd_grad, is_in_recomputation, is_outermost_backward
from zeroengine.runtime.cursor import Cursor
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.visit_log import EARLIEST, Place, Visit, VisitLog, VisitLogs


class GraphTask:
    """A backward that autograd runs. Others may be nested in it.

    Attributes:
        number: The number that autograd gave to it.
        cursor: Where it is.
        is_outermost: Whether it is not nested in another one.
        accumulates: Whether it accumulates gradients, unlike ``torch.autograd.grad``.
        recomputation: The log of the recomputation in progress or the last one, if there was any.
    """

    def __init__(self, number: int, cursor: Cursor, *, is_outermost: bool, accumulates: bool) -> None:
        self.number, self.cursor = number, cursor
        self.is_outermost, self.accumulates = is_outermost, accumulates
        self.recomputation: VisitLog | None = None


class GradientSide(Protocol):
    """What a traversal calls of ``Backward``, which owns it."""

    @property
    def is_producing_gradients(self) -> bool:
        """Whether the backward that runs now accumulates gradients."""

    def begin_task(self, task: GraphTask) -> None:
        """Autograd has begun a backward."""

    def end_task(self, task: GraphTask) -> None:
        """Autograd has ended a backward, which has not raised."""

    def reduce_if_over(self, units: Iterable[Unit]) -> None:
        """Let those of ``units`` be reduced that the backwards use no more."""

    def advance(self) -> None:
        """Let units be reduced of which no visit is pending any more."""


class Traversal:
    """The backwards that autograd runs, and where they are in the logs.

    Args:
        elements: The units of elements of lists, which are released after each visit.
        gatherer: Gathers units.
        gradient_side: Is told of the way.
        is_in_forward: Whether a forward of the whole model is in progress.

    Attributes:
        logs: The logs of forwards.
        tasks: The backwards that autograd runs, the innermost last.
    """

    def __init__(
        self, elements: set[Unit], gatherer: Gatherer, gradient_side: GradientSide, is_in_forward: Callable[[], bool]
    ) -> None:
        self._elements, self._gatherer, self._gradients = elements, gatherer, gradient_side
        self._is_in_forward = is_in_forward
        self.logs = VisitLogs(WeakMethod(self, Traversal.enter))
        self.tasks: list[GraphTask] = []
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
        """Whether autograd runs a backward, as far as ``enter`` has noticed."""
        return bool(self.tasks)

    def enter(self) -> bool:
        """Return whether autograd is running a backward. Begin to follow it, once."""
        number = torch._C._current_graph_task_id()
        if number < 0:
            return False
        if self.tasks and (self.tasks[-1].number == number or any(task.number == number for task in self.tasks)):
            return True
        is_outermost = is_outermost_backward()
        if self.tasks and is_outermost:
            # An earlier backward has raised.
            self.abandon()
        is_first = not self.tasks
        if is_first:
            self._gatherer.begin_pass()
        cursor = Cursor(*self.logs.of_backward()) if is_first else Cursor()
        task = GraphTask(number, cursor, is_outermost=is_outermost, accumulates=not is_autograd_grad())
        self.tasks.append(task)
        # Autograd drops the callback if the backward raises. ``abandon`` then forgets it.
        queue_callback(partial(self._end_task, task))
        self._gradients.begin_task(task)
        return True

    def current_task(self) -> GraphTask:
        """Return the backward whose hook calls this. ``enter`` has noticed it."""
        number = torch._C._current_graph_task_id()
        return next((task for task in reversed(self.tasks) if task.number == number), self.tasks[-1])

    def _reach(self, log: VisitLog, visit: Visit) -> None:
        """Go to ``visit``, to which autograd has come."""
        if not self.enter():
            return
        log.note_run()
        if torch.is_grad_enabled():
            self._extended_logs.add(log)
        task = self._task_of(log)
        cursor = task.cursor
        cursor.join(log)
        self._move(task, visit.place)
        if not cursor.has_reached(visit):
            self._gather(visit)
            cursor.reach(visit)
            self._gradients.advance()

    def move_to_current_node(self) -> None:
        """Go to the node that autograd runs, which uses a unit without a hook."""
        node = torch._C._current_autograd_node()
        # Nodes of a recomputation may be numbered by another thread.
        if self.tasks and node is not None and self.current_task() is self.tasks[0]:
            self._move(self.tasks[0], Place(node._sequence_nr(), sys.maxsize))

    def move_before(self, log: VisitLog, visit: Visit) -> None:
        """Go to the node that was made before ``visit`` of ``log`` began."""
        if self.enter():
            task = self._task_of(log)
            if log in task.cursor.logs:
                self._move(task, Place(visit.first_node - 1, sys.maxsize))

    def _task_of(self, log: VisitLog) -> GraphTask:
        return self.current_task() if log.is_recomputation else self.tasks[0]

    def recompute(self, units: Sequence[Unit], *, is_nested: bool) -> VisitLog:
        """Go to the visit that is recomputed by a forward inside the backward. Return the log of the recomputation.

        Args:
            units: What the forward needs, before it is gathered.
            is_nested: Whether it is inside another forward that the backward runs.
        """
        task = self.current_task()
        if task.recomputation is None or not (is_nested or task.cursor.is_recomputing(units)):
            task.recomputation = VisitLog(is_recomputation=True)
            # Without gradients one checkpoint runs another one forward again. The innermost backward that is to
            # recompute the units does so now.
            is_reentrant = torch.is_grad_enabled() and not is_in_recomputation()
            for outer in reversed(self.tasks) if is_reentrant else ():
                visit = outer.cursor.recomputed_visit(units)
                if visit is not None:
                    self._move(outer, visit.place)
                    outer.cursor.reach(visit)
                    break
        return task.recomputation

    def _move(self, task: GraphTask, place: Place) -> None:
        """Move the cursor of ``task``: gather what other ranks gather on the way, and release what is over."""
        passes_over = task.accumulates and self._gradients.is_producing_gradients
        for visit in task.cursor.passed_over(place):
            if not passes_over:
                task.cursor.drop(visit)
                continue
            # It is pending until its units are gathered, so that they are reduced after that, as on other ranks.
            self._leave(task.cursor.leave(visit.place.node_number))
            if not visit.is_recomputed:
                self._gather(visit)
            task.cursor.drop(visit)
            self._leave([visit])
            self._gradients.advance()
        self._leave(task.cursor.leave(place.node_number))

    def _gather(self, visit: Visit) -> None:
        for unit in visit.units:
            # A module that holds a list keeps its other units, so it does not matter when those inside of it need them.
            if not self._is_active(unit):
                self._gatherer.visit(unit, in_backward=True)

    def _leave(self, visits: Iterable[Visit]) -> None:
        """Release the units of visits that are over, and let them be reduced."""
        units = list(dict.fromkeys(unit for visit in visits for unit in visit.units))
        for unit in units:
            # A unit that further visits need stays gathered. Elements of lists come too often for that.
            is_needed = self._is_next(unit) if unit in self._elements else self.is_pending(unit)
            if not (is_needed or self._is_active(unit)):
                self._gatherer.release(unit)
                self._gatherer.deferred_frees.retry()
        if units:
            self._gradients.reduce_if_over(unit for unit in units if unit.trainable)

    def _end_task(self, task: GraphTask) -> None:
        """End a backward that has not raised. Backwards inside of it that are still listed have raised."""
        if task in self.tasks:
            self._move(task, EARLIEST)
            del self.tasks[self.tasks.index(task) :]
            if not self.tasks:
                self._end_pass()
            elif task.accumulates:
                self._leave(self.tasks[-1].cursor.leave_recomputed())
        self._gradients.end_task(task)

    def abandon(self) -> None:
        """Forget backwards that raised. Call this where none can be in progress."""
        if self.tasks:
            self.tasks.clear()
            self._end_pass()

    def _end_pass(self) -> None:
        for log in self._extended_logs:
            log.has_one_order = False
        self._extended_logs.clear()
        # A backward inside a forward, such as torch.autograd.grad, leaves this to the end of the forward.
        if not self._is_in_forward():
            self._gatherer.release_unhooked_uses()
        self._gatherer.end_backward()
        if not self._is_in_forward():
            self._gatherer.deferred_frees.warn_of_memory()

    def is_pending(self, unit: Unit) -> bool:
        """Return whether visits of ``unit`` are known to come."""
        return any(task.cursor.is_pending(unit) for task in self.tasks)

    def _is_next(self, unit: Unit) -> bool:
        return any(task.cursor.needs_next(unit) for task in self.tasks)

    def _is_active(self, unit: Unit) -> bool:
        return any(task.cursor.is_active(unit) for task in self.tasks)

    def is_over(self, unit: Unit) -> bool:
        """Return whether the backwards use ``unit`` no more."""
        return all(task.cursor.is_over(unit) for task in self.tasks)
