"""The order of collectives: events in, actions out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from zeroengine.schedule import events
from zeroengine.schedule.actions import Action, Reduce
from zeroengine.schedule.backwards import Backwards
from zeroengine.schedule.forwards import Forwards
from zeroengine.schedule.lists import ItemList
from zeroengine.schedule.prefetch_order import PrefetchLimits
from zeroengine.schedule.reduce_order import ReduceOrder
from zeroengine.schedule.residency import GatherState, Residency, UnitFacts
from zeroengine.schedule.visits import VisitLogs


class Schedule:
    """Decides what is gathered, released and reduced, and in which order.

    Every rank has one. Events may differ between ranks as far as the data of each rank decides what it calls; the
    collectives among the actions do not. It knows no tensor, and waits for nothing.

    Args:
        units: All units, by number, in the order of registration.
        num_params: The number of parameters of each.
        units_of: By module: the units that its forward needs.
        lists: By module: the list of units that it holds.
        limits: How far to gather ahead of use.
        bucket_numel: Elements of the units whose reduces are launched together. 0: unit by unit.
        thread: The thread that makes it.
        lookups: The modules whose backward needs no values of their units, such as embeddings.

    Attributes:
        forwards: The forwards in progress.
        backwards: The backwards in progress.
        logs: The logs of forwards.
        residency: The units that are gathered.
        reduce_order: The gradients that are to come.
    """

    def __init__(
        self,
        units: Sequence[UnitFacts],
        num_params: Sequence[int],
        units_of: Sequence[Sequence[int]],
        lists: Mapping[int, ItemList],
        limits: PrefetchLimits,
        bucket_numel: int = 0,
        thread: int = 0,
        lookups: Collection[int] = (),
    ) -> None:
        self._actions: list[Action] = []
        self.logs = logs = VisitLogs(thread)
        self.residency = Residency(units, limits, self._actions)
        self.reduce_order = ReduceOrder(units, num_params, bucket_numel, self._actions)
        self.backwards = Backwards(units, logs, self.residency, self.reduce_order)
        self.forwards = Forwards(units, units_of, lists, lookups, logs, self.residency, self.backwards)
        forwards, backwards, residency, reduce_order = self.forwards, self.backwards, self.residency, self.reduce_order
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            events.ForwardBegan: forwards.begin,
            events.ForwardEnded: forwards.end,
            events.ForwardsAbandoned: lambda _: forwards.abandon(),
            events.Entered: forwards.enter,
            events.ListEnded: forwards.end_list,
            events.Left: forwards.leave,
            events.Used: forwards.use,
            events.BackwardBegan: backwards.begin,
            events.Reached: backwards.reach,
            events.ReachedInputs: backwards.reach_inputs,
            events.BackwardEnded: lambda event: backwards.end(event.task),
            events.BackwardsAbandoned: lambda _: backwards.abandon(),
            events.GradientsBegan: reduce_order.begin,
            events.CallBegan: lambda _: backwards.begin_call(),
            events.GradientsArrived: backwards.count_gradients,
            events.CallEnded: lambda _: reduce_order.end_call(),
            events.GradientsEnded: lambda _: reduce_order.end(),
            events.GradientsDropped: lambda _: reduce_order.drop(),
            events.StepBegan: lambda _: self._begin_step(),
            events.StepEnded: lambda _: reduce_order.end_step(),
            events.Published: lambda event: residency.note_gathering(event.unit),
            events.Pinned: lambda event: residency.pin(event.unit),
            events.Unpinned: lambda event: residency.unpin(event.unit),
            events.Settled: lambda event: residency.settle(event.unit),
            events.ValuesChange: lambda event: residency.release(event.unit),
        }

    def _begin_step(self) -> None:
        self.reduce_order.reduce_remaining()
        self.logs.forget_earlier()

    def handle(self, event: events.Event) -> Sequence[Action]:
        """Return what is to be done now, in this order, because of ``event``."""
        # An event that Ctrl-C has interrupted may have left some.
        self._actions.clear()
        self._handlers[type(event)](event)
        return self._actions[:]

    def note_failure(self, not_done: Sequence[Action], states: Sequence[GatherState]) -> None:
        """Note that an action has raised, or that something has come between an event and its actions.

        Args:
            not_done: The action, and those after it.
            states: By unit, the state that it has now.
        """
        self.residency.restore(states, not_done)
        self.reduce_order.forget(action.unit for action in not_done if isinstance(action, Reduce))
