"""Does what the schedule says, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from zeroengine.runtime.gradient_hooks import NONE, ArrivingGradients
from zeroengine.runtime.unit import Unit
from zeroengine.schedule.actions import Action, Gather, Reduce, Release
from zeroengine.schedule.events import Event, GradientsArrived
from zeroengine.schedule.schedule import Schedule

A = TypeVar("A", bound=Action)


class Executor:
    """Tells the schedule what happens on this rank, and does what follows.

    Args:
        schedule: The schedule.
        units: All units, by number.

    Attributes:
        schedule: The schedule.
        units: All units, by number.
        arriving: The unit whose gradients arrive now.
        launches: The gathers and reduces that were launched since the list was assigned; None: nobody asks.
        tell_launch: Called with each gather and reduce before it is launched; None: nobody asks.
        not_launched: The reduces that an error has kept from being launched.
    """

    def __init__(self, schedule: Schedule, units: Sequence[Unit]) -> None:
        self.schedule, self.units, self.arriving = schedule, units, ArrivingGradients()
        self.launches: list[Gather | Reduce] | None = None
        self.tell_launch: Callable[[Gather | Reduce], None] | None = None
        self.not_launched: list[Reduce] = []
        self._performers: dict[type[Any], Callable[[Any], None]] = {}

    def repeat(self, launches: Iterable[Gather | Reduce]) -> None:
        """Take part in collectives that other ranks launch, where this rank computes nothing. The schedule is not told.

        Nothing may use the units' parameters. Reduces get zeros for what has not arrived.
        """
        for launch in launches:
            if isinstance(launch, Reduce):
                self._performers[Reduce](launch)
                continue
            if not self.units[launch.unit].is_released:
                self._performers[Gather](Gather(launch.unit))
                self._performers[Release](Release(launch.unit))
            self._performers[Gather](launch)
            self._performers[Release](Release(launch.unit))

    def let_perform(self, action: type[A], performer: Callable[[A], None]) -> None:
        """Let ``performer`` do the actions of one type."""
        self._performers[action] = performer

    def tell(self, event: Event, before_actions: Callable[[], None] | None = None) -> None:
        """Tell the schedule of an event, and do what follows.

        Args:
            event: What has happened.
            before_actions: Is called before the actions.
        """
        if self.arriving.unit != NONE:
            self.tell_arrived()
        actions, num_done = self.schedule.handle(event), 0
        try:
            if before_actions is not None:
                before_actions()
            for action in actions:
                self._performers[type(action)](action)
                num_done += 1
        except BaseException:
            self._note_failure(actions[num_done:])
            raise

    def tell_arrived(self) -> None:
        """Tell the schedule of the gradients of the open unit that it does not know of, and close the unit."""
        unit, params = self.arriving.close()
        if params:
            self.tell(GradientsArrived(unit, params))

    def forget_interrupted(self) -> None:
        """Let the schedule know what units have, as an error or Ctrl-C may have come in the midst of an event."""
        self._note_failure(())

    def _note_failure(self, not_done: Sequence[Action]) -> None:
        self.not_launched = [action for action in not_done if isinstance(action, Reduce)]
        self.schedule.note_failure(not_done, [unit.state for unit in self.units])
