"""The most bytes of units that are gathered at one time, by playing a pass through the rules of the gatherer.

Modules are taken to run in the order in which the model registers them, one call each. A model that runs them in
another order gathers the same units, and may have other pairs of them gathered at one time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zeroengine.partition.cut import UnitPlan
from zeroengine.runtime.prefetch_order import PrefetchLimits, PrefetchOrder


@dataclass(eq=False)
class GatheredUnit:
    """A unit that is released between uses.

    Attributes:
        plan: The unit.
        numel: The elements of its full buffer.
        gathers_ahead: Whether its gather may start ahead of its use.
        is_released: Whether it is released at the moment of the pass that is played.
    """

    plan: UnitPlan
    numel: int
    gathers_ahead: bool
    is_released: bool = field(default=True, init=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffer."""
        return self.numel * self.plan.dtype.itemsize


class _Use(NamedTuple):
    """The time in which a module, or the backward of several, needs a unit."""

    start: int
    stop: int
    unit: GatheredUnit


def most_gathered_bytes(units: Sequence[GatheredUnit], limits: PrefetchLimits) -> int:
    """Return the most bytes of ``units``, which are in the order of registration, that are gathered at one time."""
    forward = [use for unit in units for use in _forward_uses(unit)]
    backward = [use for unit in units for use in _backward_uses(unit)]
    last = max(forward, key=lambda use: use.start, default=None)
    # The unit that a forward needs last stays gathered for the backward.
    kept = last.unit if last is not None else None
    return max(_most_in_pass(forward, None, limits), _most_in_pass(backward, kept, limits, ends_first=False))


def _forward_uses(unit: GatheredUnit) -> Iterator[_Use]:
    for module, position in zip(unit.plan.modules, unit.plan.positions, strict=True):
        yield _Use(position, position + sum(1 for _ in module.modules()), unit)


def _backward_uses(unit: GatheredUnit) -> Iterator[_Use]:
    # Time runs from high positions to low ones.
    uses = [_Use(-use.stop, -use.start, unit) for use in _forward_uses(unit)]
    if not unit.plan.trainable:
        return iter(uses)
    # A trainable unit is released when all of its parameters have their gradients.
    return iter([_Use(min(use.start for use in uses), max(use.stop for use in uses), unit)] if uses else [])


def _most_in_pass(
    uses: Sequence[_Use], kept: GatheredUnit | None, limits: PrefetchLimits, *, ends_first: bool = True
) -> int:
    # In forward a module releases its units before the next one begins. In backward the gradient of one tensor begins
    # the backward of the module that made it, and then ends that of the module that took it.
    order = (0, 1) if ends_first else (1, 0)
    events = sorted(
        [(use.stop, order[0], False, index) for index, use in enumerate(uses)]
        + [(use.start, order[1], True, index) for index, use in enumerate(uses)]
    )
    prefetch_order: PrefetchOrder[GatheredUnit] = PrefetchOrder()
    # The pass before this one had the same visits.
    for _, _, begins, index in events:
        if begins:
            prefetch_order.note_use(uses[index].unit, in_backward=False)
    prefetch_order.start_pass()
    for use in uses:
        use.unit.is_released = True
    num_users: Counter[GatheredUnit] = Counter()
    nbytes = live_numel = 0

    def mark(unit: GatheredUnit, *, is_released: bool) -> None:
        nonlocal nbytes, live_numel
        if unit.is_released != is_released:
            unit.is_released, sign = is_released, -1 if is_released else 1
            nbytes, live_numel = nbytes + sign * unit.nbytes, live_numel + sign * unit.numel

    if kept is not None:
        mark(kept, is_released=False)
    most = nbytes
    for _, _, begins, index in events:
        unit = uses[index].unit
        num_users[unit] += 1 if begins else -1
        if begins or not num_users[unit]:
            mark(unit, is_released=not begins)
        if begins:
            prefetch_order.note_use(unit, in_backward=False)
            for following in prefetch_order.to_prefetch(limits, live_numel):
                mark(following, is_released=not following.gathers_ahead)
            most = max(most, nbytes)
    return most
