"""How far units are gathered ahead of use."""

from __future__ import annotations

from zeroengine.schedule.actions import Action, Prefetch
from zeroengine.schedule.prefetch_order import PrefetchLimits
from zeroengine.schedule.residency import Residency, UnitFacts

NUMEL = 856_000_000  # of a block of a Llama of 70 B parameters


def prefetched(residency: Residency, actions: list[Action]) -> list[list[int]]:
    """What is gathered ahead at each use of a pass that releases each of four blocks after its use."""
    residency.begin_pass()
    ahead = []
    for block in range(4):
        actions.clear()
        residency.gather_and_prefetch(block, in_backward=False)
        ahead.append([action.unit for action in actions if isinstance(action, Prefetch)])
        residency.release(block)
    residency.end_forward_pass()
    return ahead


def test_the_next_unit_is_prefetched_however_large_it_is() -> None:
    for numel in (50_000_000, 2_000_000_000):
        actions: list[Action] = []
        limits = PrefetchLimits(numel, 1_000_000_000)
        residency = Residency([UnitFacts(name, NUMEL) for name in "abcd"], limits, actions)
        assert prefetched(residency, actions) == [[]] * 4, "nothing is known"
        assert prefetched(residency, actions) == [[1], [2], [3], []]
        # Only where the other limit would have allowed more is this one to blame.
        assert residency.live_numel_refused == (3 * NUMEL if numel > 10**9 else 0)


def test_no_limit_of_prefetching_means_none() -> None:
    actions: list[Action] = []
    residency = Residency([UnitFacts(name, NUMEL) for name in "abcd"], PrefetchLimits(0, 10**12), actions)
    for _ in range(2):
        assert prefetched(residency, actions) == [[]] * 4
