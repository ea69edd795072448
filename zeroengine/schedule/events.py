"""What happens on a rank, as the schedule learns of it. Units, modules and nodes of autograd are numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zeroengine.schedule.visits import Visit, VisitLog


class Moment(NamedTuple):
    """What autograd says when a forward of a module begins or ends.

    Attributes:
        has_grad: Whether gradients are enabled.
        next_node: The number of the next node.
        thread: The thread.
        task: The number of the backward that runs now; below 0: none.
        checkpoint_node: The number of the node of the outermost Function in whose forward this runs, such as a
            reentrant checkpoint's. None: it runs in none, or the schedule does not ask (``asks_for_checkpoint``).
        recomputes_by_node: Whether a recomputation that begins now is a reentrant checkpoint's.
        node: The number of the node that autograd runs now, and that has a checkpoint recompute its tensors. None: it
            runs none, or one of another thread.
    """

    has_grad: bool
    next_node: int
    thread: int = 0
    task: int = -1
    checkpoint_node: int | None = None
    recomputes_by_node: bool = False
    node: int | None = None

    @property
    def has_backward(self) -> bool:
        """Whether a backward may follow, as far as the schedule has asked."""
        return self.has_grad or self.checkpoint_node is not None

    @property
    def present_node(self) -> int:
        """The number of the node of the checkpoint that runs now, or of the latest node."""
        if self.has_grad or self.checkpoint_node is None:
            return self.next_node - 1
        return self.checkpoint_node


# -- forwards ------------------------------------------------------------------------------------------


class ForwardBegan(NamedTuple):
    """A forward of the whole model begins. It may be nested in another one."""

    has_grad: bool
    thread: int = 0


class ForwardEnded(NamedTuple):
    """A forward of the whole model has ended, or raised.

    Attributes:
        shows_outputs: Whether it returned tensors by which autograd tells whether a backward contains it.
    """

    shows_outputs: bool = False


class ForwardsAbandoned(NamedTuple):
    """No forward is in progress. The ends of some may not have been reported."""


class Entered(NamedTuple):
    """The forward of a module begins.

    Attributes:
        module: The module.
        moment: Now.
        is_tracked: Whether a backward may follow.
    """

    module: int
    moment: Moment
    is_tracked: bool = True


class ListEnded(NamedTuple):
    """The forward of a module that holds a list is about to return: no more items are called."""

    module: int
    moment: Moment


class Left(NamedTuple):
    """The forward of a module has ended, or raised.

    Attributes:
        module: The module.
        moment: Now.
        last_node: The number of the last node of what it returned. None: no backward comes to it.
        has_tensors: Whether it returned any tensor.
        in_checkpoint: Whether it runs in the forward, or the recomputation, of a non-reentrant checkpoint.
    """

    module: int
    moment: Moment
    last_node: int | None = None
    has_tensors: bool = True
    in_checkpoint: bool = False


class Used(NamedTuple):
    """A released unit is used, and no hook has announced that.

    Attributes:
        unit: The unit.
        moment: Now.
        node: The number of the node that autograd runs now. None: it runs none, or one of another thread.
        is_saved: Whether a graph saved what is read.
    """

    unit: int
    moment: Moment
    node: int | None = None
    is_saved: bool = False


# -- backwards -----------------------------------------------------------------------------------------


class BackwardBegan(NamedTuple):
    """Autograd runs a backward.

    Attributes:
        task: Its number.
        is_outermost: Whether it is not nested in another one. Then earlier ones that are listed have raised.
        accumulates: Whether it accumulates gradients, unlike ``torch.autograd.grad``.
        contained: The logs that it is known to contain.
    """

    task: int
    is_outermost: bool = True
    accumulates: bool = True
    contained: Sequence[VisitLog] = ()


class Reached(NamedTuple):
    """A backward comes to the outputs of a visit.

    Attributes:
        task: The backward.
        log: The log of the visit.
        visit: The visit.
        keeps_graph: Whether it retains the graph.
        extends_graph: Whether it makes nodes (``create_graph``).
    """

    task: int
    log: VisitLog
    visit: Visit
    keeps_graph: bool = False
    extends_graph: bool = False


class ReachedInputs(NamedTuple):
    """A backward comes to what was made before a visit began."""

    task: int
    log: VisitLog
    visit: Visit


class BackwardEnded(NamedTuple):
    """Autograd has ended a backward, which has not raised."""

    task: int


class BackwardsAbandoned(NamedTuple):
    """No backward runs. Those that are listed have raised."""


class GradientsBegan(NamedTuple):
    """A backward begins that computes gradients of parameters.

    Attributes:
        by_engine: Whether it is no plain ``loss.backward()``.
        reduces: Whether gradients are reduced over the ranks; False inside ``no_sync``.
        is_last: Whether it is probably the last one before the update.
    """

    by_engine: bool
    reduces: bool = True
    is_last: bool = True


class CallBegan(NamedTuple):
    """One of the calls of which such a backward consists begins to accumulate gradients.

    It is told again when autograd runs it, because then it is known which logs it contains.
    """


class GradientsArrived(NamedTuple):
    """Autograd has accumulated gradients. ``params``: the indices of the parameters in the unit, in this order."""

    unit: int
    params: Sequence[int]


class CallEnded(NamedTuple):
    """A plain ``loss.backward()`` that accumulates gradients has ended."""


class GradientsEnded(NamedTuple):
    """The backward has ended that computes gradients of parameters."""


class GradientsDropped(NamedTuple):
    """All gradients of the step in progress are dropped."""


# -- steps, and values that are read or change ---------------------------------------------------------


class StepBegan(NamedTuple):
    """A step begins: what was not reduced in it is to be reduced."""


class StepEnded(NamedTuple):
    """A step has ended."""


class Published(NamedTuple):
    """The all-gather of the updated parameters of a unit that is never released was launched."""

    unit: int


class Pinned(NamedTuple):
    """A unit is to be gathered with exact values, and kept until ``Unpinned``."""

    unit: int


class Unpinned(NamedTuple):
    """One pin of a unit ends."""

    unit: int


class Settled(NamedTuple):
    """The values of a unit may change: a gather that was launched is to be ready first."""

    unit: int


class ValuesChange(NamedTuple):
    """The values of a unit change now: it is released, unless it is pinned."""

    unit: int


Event = (
    ForwardBegan
    | ForwardEnded
    | ForwardsAbandoned
    | Entered
    | ListEnded
    | Left
    | Used
    | BackwardBegan
    | Reached
    | ReachedInputs
    | BackwardEnded
    | BackwardsAbandoned
    | GradientsBegan
    | CallBegan
    | GradientsArrived
    | CallEnded
    | GradientsEnded
    | GradientsDropped
    | StepBegan
    | StepEnded
    | Published
    | Pinned
    | Unpinned
    | Settled
    | ValuesChange
)
