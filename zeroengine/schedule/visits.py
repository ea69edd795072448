"""The log of a forward: the visits to units that it made, in the order in which a backward goes back through them.

[Note: One order of collectives]
A gather takes all ranks, and so does a reduce. Each forward of the model leaves a log of *visits*, which is equal on
all ranks, although the data of each rank may decide what it calls:

    a call                   of a module that needs units
    a skipped item           of a list (``partition/unit_lists.py``): other ranks may have called it
    calls to recompute       in a reentrant checkpoint, which runs without gradients, and again in backward

A backward is one ``Cursor``, which goes back through the logs that the backward contains. Autograd reports positions
and nothing else. Of the nodes that are ready it runs the one that was made last, and a node that is not ready waits for
later ones. So with one thread it runs the nodes in descending order of the numbers that it gave them. Each visit has a
*place*: the number of the last node of what it returned. When autograd comes to a visit, the cursor moves there and
*passes over* the visits at later places that autograd has not come to, such as a head that the loss of this rank does
not depend on. Their units are gathered as on the ranks whose backward does come to them.

    forward, rank 0    calls experts 0, 1 and 3     log: 0, 1, (2), 3
    forward, rank 1    calls experts 1 and 2        log: (0), 1, 2, (3)
    backward, rank 0   3, passes over 2, 1, 0
    backward, rank 1   passes over 3, 2, 1, passes over 0

A visit is *pending* until autograd comes to it or it is passed over, and *over* when the cursor has moved to a node
that was made before the visit began: every node of it has run. A unit is released when the visits that the cursor has
come to are over. It is reduced when it has all its gradients and no visit of it is pending, or when all of its visits
are over, with zeros for the gradients that this rank lacks. So every rank reduces it at the same place.

What no rank runs backward, such as a branch that is detached, is gathered for nothing. Run it under
``torch.no_grad()`` instead.

[Note: Which logs a backward contains]
Usually a backward follows each forward, and contains it alone. But a loss may be of several forwards, or of an earlier
one than the latest. When a backward begins, autograd is asked whether it will run an inner node of each forward, one
below an output of the model. If the outputs are hidden in objects, or modules are called without the model, this shows
nothing. Then the backward contains the forward once autograd has come to a visit of it.

Which graphs are alive is no matter: an exception may keep one on one rank, and the garbage collector frees it when it
likes. A backward after a step is of later forwards, because the step has changed what the earlier ones saved.

Some logs have no order that the numbers tell: parts of the forward ran in several threads, each of which counts for
itself, or a backward with ``create_graph`` has added to the graph. Nothing of such a log is passed over, and its units
are pending until the backward ends.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# The most visits of one log that are followed: the latest ones. Outside of forwards of the whole model, modules may be
# called for ever without a backward.
MAX_VISITS = 10_000
# The most logs that are kept, the latest ones. Without steps, forwards may be run for ever.
MAX_LOGS = 100


class Place(NamedTuple):
    """Where a backward comes to a visit. Higher places come first."""

    node_number: int
    tie: int  # counts visits


# Before every visit.
EARLIEST = Place(-1, 0)


class Visit:
    """A part of a forward that needs units.

    Attributes:
        units: Releasable units, in the order in which they are gathered.
        place: Where a backward comes to it.
        first_node: The number of the first node that it may have made.
        needs_values: Whether its backward needs the values of the units.
        is_recomputed: Whether it ran without gradients in a reentrant checkpoint, which runs it again in backward.
    """

    __slots__ = ("first_node", "is_recomputed", "needs_values", "place", "units")

    def __init__(self, units: Sequence[int], first_node: int, *, needs_values: bool = True) -> None:
        self.units, self.first_node, self.needs_values = list(units), first_node, needs_values
        self.place = Place(sys.maxsize, 0)
        self.is_recomputed = False


class VisitLog:
    """The visits of one forward of the whole model, or of a recomputation.

    Args:
        thread: The thread that it begins in.
        is_recomputation: Whether a backward runs the forward again, as a checkpoint does.

    Attributes:
        visits: The visits, in the order in which they ended.
        untracked: Units that the forward used in a way that no visit shows, so that they are pending to the end.
        has_run: Whether a backward has come to it.
        is_retained: Whether such a backward retained the graph, so that another one may come.
        has_one_order: Whether autograd runs the visits in descending order of their places.
        shows_outputs: Whether the forward returned tensors by which autograd tells whether a backward contains it.
    """

    def __init__(self, thread: int = 0, *, is_recomputation: bool = False) -> None:
        self.thread, self.is_recomputation = thread, is_recomputation
        self.visits: list[Visit] = []
        self.untracked: set[int] = set()
        self.has_run = self.is_retained = False
        self.has_one_order, self.shows_outputs = True, False
        self._num_visits = 0

    @property
    def may_run(self) -> bool:
        """Whether a backward may come to it, as far as the backwards show that have come to it."""
        return self.is_retained or not self.has_run

    def set_place(self, visit: Visit, node_number: int) -> None:
        """Set the place of a visit that has ended, behind those that have. ``add`` comes later.

        Args:
            visit: The visit.
            node_number: The number of the last node of what it returned.
        """
        self._num_visits += 1
        visit.place = Place(node_number, self._num_visits)

    def add(self, visits: Iterable[Visit], thread: int) -> None:
        """Add visits that have their places, and that ended in ``thread``."""
        self.visits += visits
        del self.visits[:-MAX_VISITS]
        self.has_one_order = self.has_one_order and self.thread == thread

    def add_recomputed(self, units: Sequence[int], node_number: int, thread: int) -> None:
        """Add units that a reentrant checkpoint uses now without gradients, and again in backward.

        Args:
            units: The units.
            node_number: The number of the checkpoint's node.
            thread: The thread that this runs in.
        """
        last = self.visits[-1] if self.visits else None
        if last is not None and last.is_recomputed and last.place.node_number == node_number:
            last.units += [unit for unit in units if unit not in last.units]
            return
        visit = Visit(units, node_number)
        visit.is_recomputed = True
        self.set_place(visit, node_number)
        self.add([visit], thread)

    def note_run(self, *, keeps_graph: bool) -> None:
        """Note that a backward has come to it, and whether that retains the graph."""
        self.has_run = True
        self.is_retained = self.is_retained or keeps_graph


class VisitLogs:
    """The logs of the forwards of the whole model since the last step.

    Args:
        thread: The thread that begins.

    Attributes:
        latest: The log of the latest forward.
    """

    def __init__(self, thread: int) -> None:
        self._logs: deque[VisitLog] = deque(maxlen=MAX_LOGS)
        self.begin(thread)

    def begin(self, thread: int) -> None:
        """Begin the log of a forward, which begins in ``thread``."""
        self.latest = VisitLog(thread)
        self._logs.append(self.latest)

    def continue_latest(self, thread: int) -> None:
        """Note a call outside of a forward of the whole model. It belongs to the latest one, or to a new one."""
        if not self.latest.may_run:
            self.begin(thread)

    def forget_earlier(self) -> None:
        """Forget all logs but the latest, because a step begins."""
        self._logs.clear()
        self._logs.append(self.latest)

    def unknown(self, contained: Sequence[VisitLog]) -> list[VisitLog]:
        """Return the logs that a backward which begins may contain. See "Which logs a backward contains".

        Args:
            contained: The logs that it is known to contain.
        """
        # A backward that does not come from outputs, but from tensors inside of a forward, shows nothing.
        return [
            log for log in self._logs if (log.may_run or log is self.latest) and not (contained and log.shows_outputs)
        ]
