"""Which units have their parameters, and which are gathered next. It knows nothing of what runs.

[Note: When a unit is gathered]
    forward of a module       its beginning gathers its units and prefetches the next ones; its end releases them
    backward of a module      the first gradient of its outputs gathers; when the backward goes on to what was made
                              before the module's forward, it releases
    use without a hook        gathered on the spot, released when the pass ends
    ``zeroengine.gathered``   a pin gathers, and the last one that goes releases
    not ``is_releasable``     never released; the next use waits for the all-gather of the step

Units that a backward gathered and did not release are released when it ends.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zeroengine.schedule.actions import Action, Gather, Prefetch, ReadAhead, Release
from zeroengine.schedule.prefetch_order import PrefetchLimits, PrefetchOrder


class GatherState(enum.Enum):
    """Whether a unit's parameters hold their values."""

    RELEASED = "released"  # a use of a parameter needs a gather first
    GATHERING = "gathering"  # the all-gather is in progress; values may be stale or absent
    GATHERED = "gathered"  # parameters hold their values


class Ahead(enum.Enum):
    """What may be done for a unit ahead of its use."""

    NOTHING = "nothing"
    READ = "read"  # of this rank's own shard, from where it is offloaded
    GATHER = "gather"


class UnitFacts(NamedTuple):
    """What the schedule knows of a unit.

    Attributes:
        name: The unit's name in messages.
        numel: The elements of the full buffer.
        is_releasable: Whether it is released between uses.
        is_trained: Whether its gradients are reduced.
        is_sharded: Whether each micro-step is reduced to this rank's shard, rather than the last one alone.
        is_item: Whether it belongs to an item of a list, and so is released after each visit.
        ahead: What may be done ahead of its use.
    """

    name: str
    numel: int
    is_releasable: bool = True
    is_trained: bool = True
    is_sharded: bool = True
    is_item: bool = False
    ahead: Ahead = Ahead.GATHER


class Residency:
    """The units that are gathered, in use, pinned, or kept.

    Args:
        units: All units, by number.
        limits: How far to gather ahead of use.
        actions: What is to be done is added to it.

    Attributes:
        states: By unit, whether the parameters hold their values.
        num_pins: The number of pins now, such as those of ``zeroengine.gathered``; a unit that is pinned twice counts
            twice. Ranks may run different forwards meanwhile, so no order of units is learned or followed.
        live_numel: Elements of releasable units that are gathered now.
        live_numel_refused: The elements that would have been live at the last unit that ``max_live_numel`` alone kept
            from being prefetched. 0: there was none.
        num_forwards: The number of forwards of the whole model that are in progress. They may be nested.
        trains: Whether the gradients of any unit are reduced.
        unhooked: The units that were gathered for a use without a hook, in that order.
    """

    def __init__(self, units: Sequence[UnitFacts], limits: PrefetchLimits, actions: list[Action]) -> None:
        self._units, self._limits, self._actions = units, limits, actions
        self.states = [GatherState.RELEASED if unit.is_releasable else GatherState.GATHERED for unit in units]
        self._pins, self._num_users = [0] * len(units), [0] * len(units)
        self.num_pins = self.live_numel = self.live_numel_refused = self.num_forwards = 0
        self.unhooked: dict[int, None] = {}
        self.trains = any(unit.is_trained for unit in units)
        self._order = self._new_prefetch_order()
        # Whether a backward follows the forward in progress, and the last unit of the latest forward that one followed.
        self._has_backward = False
        self._last_in_forward: int | None = None

    def _new_prefetch_order(self) -> PrefetchOrder:
        # A model that only runs forwards has as much to read in the first one as in any other.
        guess = [] if self.trains else [number for number, unit in enumerate(self._units) if unit.is_releasable]
        return PrefetchOrder(self._limits.numel, lambda unit: self._units[unit].numel, guess)

    # -- single units -----------------------------------------------------------------------------

    def gather(self, unit: int, *, exact: bool = False) -> None:
        """Have the parameters of ``unit`` ready for use. ``exact``: see ``Gather``."""
        state = self.states[unit]
        # Which values a gathered unit has, exact or quantized ones, is equal on all ranks and no matter of order.
        if state is GatherState.GATHERED and not exact:
            return
        if state is GatherState.RELEASED:
            self.live_numel += self._units[unit].numel
        self.states[unit] = GatherState.GATHERED
        self._actions.append(Gather(unit, exact))

    def release(self, unit: int) -> None:
        """Release ``unit`` unless it is pinned or a forward in progress needs it."""
        if (
            self.states[unit] is GatherState.GATHERED
            and self._units[unit].is_releasable
            and not (self._pins[unit] or self._num_users[unit])
        ):
            self.live_numel -= self._units[unit].numel
            self.states[unit] = GatherState.RELEASED
            self._actions.append(Release(unit))

    def note_gathering(self, unit: int) -> None:
        """Note that the all-gather of updated values of a unit that is never released was launched."""
        self.states[unit] = GatherState.GATHERING

    def settle(self, unit: int) -> None:
        """Have a unit ready for use whose gather was launched."""
        if self.states[unit] is GatherState.GATHERING:
            self.gather(unit)

    def is_in_use(self, unit: int) -> bool:
        """Return whether a forward in progress needs ``unit``."""
        return self._num_users[unit] > 0

    def begin_use(self, units: Iterable[int]) -> None:
        """Note that a forward needs ``units`` until ``end_use``. Nested modules may share a unit."""
        for unit in units:
            self._num_users[unit] += 1

    def forget_uses(self) -> None:
        """Note that no forward is in progress."""
        self._num_users = [0] * len(self._units)

    def end_use(self, units: Iterable[int]) -> None:
        """Note that a forward which needed ``units`` is over."""
        for unit in units:
            self._num_users[unit] -= 1

    def pin(self, unit: int) -> None:
        """Gather ``unit`` with exact values, and keep it gathered until ``unpin``. Pins count."""
        self.gather(unit, exact=True)
        self._pins[unit] += 1
        self.num_pins += 1

    def unpin(self, unit: int) -> None:
        """Undo one ``pin``, and release ``unit`` if it has no other."""
        self._pins[unit] -= 1
        self.num_pins -= 1
        self.release(unit)

    def pinned(self) -> list[int]:
        """Return the units that are pinned."""
        return [unit for unit, num_pins in enumerate(self._pins) if num_pins]

    def restore(self, states: Iterable[GatherState], not_done: Sequence[Action]) -> None:
        """Note the states that units have, and that actions were not done."""
        self.states = list(states)
        if not_done:
            # How much was noted of this pass depends on what the rank was about to do.
            self._order, self._last_in_forward = self._new_prefetch_order(), None
        for action in not_done:
            # Pins alone need exact values, and a pin that failed is none.
            if isinstance(action, Gather) and action.exact:
                self._pins[action.unit] -= 1
                self.num_pins -= 1
        self.live_numel = sum(
            unit.numel
            for unit, state in zip(self._units, self.states, strict=True)
            if unit.is_releasable and state is not GatherState.RELEASED
        )

    # -- passes: forwards of the whole model, or of a part that is called by itself, and backwards --------

    def begin_pass(self, *, has_backward: bool = True) -> None:
        """Begin a forward or a backward. ``has_backward``: whether it is one, or a forward that one follows."""
        # Between an evaluation and a step of a training nothing is kept whole.
        self._order.start_pass(is_followed=not (has_backward or self.trains))
        self._has_backward = has_backward

    def end_forward_pass(self) -> None:
        """End the forward that has begun. If another one follows, gather its first units ahead."""
        if self._has_backward:
            self._last_in_forward = self._order.last
        self._order.end_pass()
        self._prefetch()

    def end_backward_pass(self) -> None:
        """End the backward that has begun, and release what it has gathered and not released."""
        self._order.end_pass()
        for unit in range(len(self._units)):
            if unit not in self.unhooked:
                self.release(unit)

    def gather_and_prefetch(self, unit: int, *, in_backward: bool) -> None:
        """Gather ``unit``, which a pass needs now, and gather ahead the units that followed it in the previous pass."""
        self.gather(unit)
        # The order matters only for releasable units, and only where all ranks visit the same units.
        if self.num_pins or not self._units[unit].is_releasable:
            return
        self._order.note_use(unit, in_backward)
        self._prefetch()

    def _prefetch(self) -> None:
        live_numel, max_live_numel, states = self.live_numel, self._limits.max_live_numel, self.states
        units, num_next = self._order.upcoming()
        for position, unit in enumerate(units):
            is_released = states[unit] is GatherState.RELEASED
            if is_released:
                live_numel += self._units[unit].numel
            if live_numel > max_live_numel and position >= num_next:
                self.live_numel_refused = live_numel
                return
            if is_released:
                self._start(unit)

    def _start(self, unit: int) -> None:
        # A collective is started early only if it proceeds by itself. Otherwise at most this rank's own shard is read
        # ahead, which concerns no other rank.
        ahead = self._units[unit].ahead
        if ahead is Ahead.GATHER:
            self.live_numel += self._units[unit].numel
            self.states[unit] = GatherState.GATHERING
            self._actions.append(Prefetch(unit))
        elif ahead is Ahead.READ:
            self._actions.append(ReadAhead(unit))

    def is_kept_for_backward(self, unit: int) -> bool:
        """Return whether a forward that a backward follows keeps ``unit``: the last unit of a forward is its first."""
        return unit == self._last_in_forward

    # -- uses that no hook announced --------------------------------------------------------------

    def use_unhooked(self, unit: int) -> None:
        """Note that ``unit`` is used without a hook, so that it stays gathered until the pass ends."""
        self.unhooked[unit] = None

    def release_unhooked(self, unit: int) -> None:
        """Release ``unit`` if it was gathered for a use that no hook announced."""
        if unit in self.unhooked:
            del self.unhooked[unit]
            self.release(unit)

    def release_all_unhooked(self) -> None:
        """Release the units that were gathered for uses that no hook announced."""
        units, self.unhooked = self.unhooked, {}
        for unit in units:
            self.release(unit)
