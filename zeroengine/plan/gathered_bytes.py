"""The most bytes of units that are gathered at one time, by playing a pass through the rules of the gatherer.

Modules are taken to run in the order in which the model registers them, one call each. A model that runs them in
another order gathers the same units, and may have other pairs of them gathered at one time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeroengine.partition.cut import UnitPlan


class PrefetchLimits(NamedTuple):
    """How far the gatherer gathers ahead of use.

    Attributes:
        numel: Elements that may be gathered ahead of use; 0: nothing is.
        max_live_numel: Elements up to which prefetching continues.
    """

    numel: int
    max_live_numel: int


@dataclass(frozen=True, eq=False)
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


class _Use(NamedTuple):
    """The time in which a module, or the backward of several, needs a unit."""

    start: int
    stop: int
    unit: GatheredUnit


def most_gathered_bytes(units: Sequence[GatheredUnit], limits: PrefetchLimits) -> int:
    """Return the most bytes of ``units``, which are in the order of registration, that are gathered at one time."""
    total_numel = sum(unit.numel for unit in units)
    if total_numel <= min(limits) and all(unit.gathers_ahead for unit in units):
        # The first unit prefetches all others.
        return sum(unit.nbytes for unit in units)
    forward = [use for unit in units for use in _forward_uses(unit)]
    backward = [use for unit in units for use in _backward_uses(unit)]
    last = max(forward, key=lambda use: use.start, default=None)
    # The unit that a forward needs last stays gathered for the backward.
    kept = {last.unit} if last is not None else set()
    return max(_most_in_pass(forward, set(), limits), _most_in_pass(backward, kept, limits, ends_first=False), 0)


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
    uses: Sequence[_Use], gathered: set[GatheredUnit], limits: PrefetchLimits, *, ends_first: bool = True
) -> int:
    # In forward a module releases its units before the next one begins. In backward the gradient of one tensor begins
    # the backward of the module that made it, and then ends that of the module that took it.
    order = (0, 1) if ends_first else (1, 0)
    events = sorted(
        [(use.stop, order[0], False, index) for index, use in enumerate(uses)]
        + [(use.start, order[1], True, index) for index, use in enumerate(uses)]
    )
    visits: list[GatheredUnit] = []
    for _, _, begins, index in events:
        if begins and (not visits or visits[-1] is not uses[index].unit):
            visits.append(uses[index].unit)
    num_users: Counter[GatheredUnit] = Counter()
    nbytes = sum(unit.nbytes for unit in gathered)
    most, visit = nbytes, -1
    live_numel = sum(unit.numel for unit in gathered)
    for _, _, begins, index in events:
        unit = uses[index].unit
        if not begins:
            num_users[unit] -= 1
            if not num_users[unit]:
                gathered.discard(unit)
                nbytes, live_numel = nbytes - unit.nbytes, live_numel - unit.numel
            continue
        num_users[unit] += 1
        if visit < 0 or visits[visit] is not unit:
            visit += 1
        if unit not in gathered:
            gathered.add(unit)
            nbytes, live_numel = nbytes + unit.nbytes, live_numel + unit.numel
        if limits.numel:
            ahead = _to_prefetch(visits, visit, gathered, live_numel, limits)
            gathered.update(ahead)
            nbytes += sum(unit.nbytes for unit in ahead)
            live_numel += sum(unit.numel for unit in ahead)
        most = max(most, nbytes)
    return most


def _to_prefetch(
    visits: Sequence[GatheredUnit], visit: int, gathered: set[GatheredUnit], live_numel: int, limits: PrefetchLimits
) -> list[GatheredUnit]:
    """Return what ``VisitOrder.to_prefetch`` yields."""
    ahead: dict[GatheredUnit, None] = {}
    ahead_numel, chosen = 0, []
    for unit in visits[visit + 1 :]:
        if unit not in ahead:
            ahead[unit] = None
            ahead_numel += unit.numel
        is_released = unit not in gathered and unit not in chosen
        live_numel += unit.numel * is_released
        if (len(ahead) > 1 and ahead_numel > limits.numel) or live_numel > limits.max_live_numel:
            break
        if is_released and unit.gathers_ahead:
            chosen.append(unit)
    return chosen
