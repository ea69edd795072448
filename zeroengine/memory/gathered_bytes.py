"""The most bytes of units that are gathered at one time, by the schedule of a step that is played without memory.

Modules are taken to run in the order in which the model registers them, one call each. A model that runs them in
another order gathers the same units, and may have other pairs of them gathered at one time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from zeroengine.partition.cut import UnitPlan
from zeroengine.runtime.scheduling import is_lookup
from zeroengine.schedule import events
from zeroengine.schedule.actions import Gather, Prefetch, Release
from zeroengine.schedule.prefetch_order import PrefetchLimits
from zeroengine.schedule.residency import Ahead, UnitFacts
from zeroengine.schedule.schedule import Schedule
from zeroengine.schedule.visits import Visit, VisitLog


@dataclass(eq=False)
class GatheredUnit:
    """A unit that is released between uses.

    Attributes:
        plan: The unit.
        numel: The elements of its full buffer.
        gathers_ahead: Whether its gather may start ahead of its use.
    """

    plan: UnitPlan
    numel: int
    gathers_ahead: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffer."""
        return self.numel * self.plan.dtype.itemsize


def most_gathered_bytes(units: Sequence[GatheredUnit], limits: PrefetchLimits) -> int:
    """Return the most bytes of ``units``, which are in the order of registration, that are gathered at one time."""
    step = _Step(units, limits)
    # The second step gathers ahead what the first one has learned.
    step.play()
    step.play()
    return step.most


class _Step:
    """A step of one rank, without memory.

    Attributes:
        most: The most bytes that were gathered at one time.
    """

    def __init__(self, units: Sequence[GatheredUnit], limits: PrefetchLimits) -> None:
        self._units = units
        facts = [
            UnitFacts(
                unit.plan.name,
                unit.numel,
                is_trained=unit.plan.trainable,
                ahead=Ahead.GATHER if unit.gathers_ahead else Ahead.NOTHING,
            )
            for unit in units
        ]
        numbers: dict[nn.Module, int] = {}
        units_of: list[list[int]] = []
        places: list[tuple[int, int]] = []
        lookups: set[int] = set()
        for number, unit in enumerate(units):
            for module, position in zip(unit.plan.modules, unit.plan.positions, strict=True):
                if module not in numbers:
                    numbers[module] = len(units_of)
                    units_of.append([])
                    places.append((position, position + sum(1 for _ in module.modules())))
                units_of[numbers[module]].append(number)
                if is_lookup(module, unit.plan.modules):
                    lookups.add(numbers[module])
        self._schedule = Schedule(facts, [1] * len(units), units_of, {}, limits, lookups=lookups)
        # A module ends before the next one begins, and an outer one begins before what is inside of it.
        self._order = sorted(
            [(start, 1, -stop, True, module) for module, (start, stop) in enumerate(places)]
            + [(stop, 0, -start, False, module) for module, (start, stop) in enumerate(places)]
        )
        self._units_of = units_of
        self._live: set[int] = set()
        self._nbytes = self.most = 0

    def play(self) -> None:
        """Play a step, or a forward alone where nothing is trained."""
        if not any(unit.plan.trainable for unit in self._units):
            for _ in self._forward(has_grad=False):
                pass
            return
        visits = list(self._forward())
        log = visits[-1][0] if visits else None
        self._tell(events.GradientsBegan(by_engine=True))
        self._tell(events.CallBegan())
        self._tell(events.BackwardBegan(1, contained=[log] if log else []))
        # Autograd adds up the gradients of a unit that several modules need, so it has them after the last of these.
        remaining = [sum(unit in needed for needed in self._units_of) for unit in range(len(self._units))]
        complete: list[int] = []
        for visit_log, visit in reversed(visits):
            self._complete(complete)
            self._tell(events.Reached(1, visit_log, visit))
            for unit in visit.units:
                remaining[unit] -= 1
                if not remaining[unit] and self._units[unit].plan.trainable:
                    complete.append(unit)
        self._complete(complete)
        self._tell(events.BackwardEnded(1))
        self._tell(events.GradientsEnded())
        self._tell(events.StepEnded())

    def _complete(self, units: list[int]) -> None:
        for unit in units:
            self._tell(events.GradientsArrived(unit, (0,)))
        units.clear()

    def _forward(self, *, has_grad: bool = True) -> Iterator[tuple[VisitLog, Visit]]:
        node = 0
        self._tell(events.ForwardBegan(has_grad))
        for _, _, _, begins, module in self._order:
            node += 1
            moment = events.Moment(has_grad, node)
            if begins:
                self._tell(events.Entered(module, moment))
            # Modules that share parts of theirs may overlap, and an outer one that ends takes the inner ones with it.
            elif (call := self._schedule.forwards.call_of(module)) is not None:
                self._tell(events.Left(module, moment, last_node=node - 1 if has_grad else None))
                yield call.log, call.visit
        self._tell(events.ForwardEnded())

    def _tell(self, event: events.Event) -> None:
        # Gathers first: a parameter that is also used outside of its module is released a little later.
        actions = self._schedule.handle(event)
        for action in sorted(actions, key=lambda action: isinstance(action, Release)):
            if isinstance(action, Gather | Prefetch) and action.unit not in self._live:
                self._live.add(action.unit)
                self._nbytes += self._units[action.unit].nbytes
                self.most = max(self.most, self._nbytes)
            elif isinstance(action, Release):
                self._live.discard(action.unit)
                self._nbytes -= self._units[action.unit].nbytes
