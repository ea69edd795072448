"""Does what the schedule says, in its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from zeroengine.runtime.unit import Unit
from zeroengine.schedule.actions import Action
from zeroengine.schedule.events import Event
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
    """

    def __init__(self, schedule: Schedule, units: Sequence[Unit]) -> None:
        self.schedule, self.units = schedule, units
        self._performers: dict[type[Any], Callable[[Any], None]] = {}

    def let_perform(self, action: type[A], performer: Callable[[A], None]) -> None:
        """Let ``performer`` do the actions of one type."""
        self._performers[action] = performer

    def tell(self, event: Event) -> None:
        """Tell the schedule of an event, and do what follows."""
        self.perform(self.schedule.handle(event))

    def perform(self, actions: Sequence[Action]) -> None:
        """Do actions, in order."""
        for index, action in enumerate(actions):
            try:
                self._performers[type(action)](action)
            except BaseException:
                self.schedule.note_failure(actions[index:], [unit.state for unit in self.units])
                raise
