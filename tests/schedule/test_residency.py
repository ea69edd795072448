"""How far units are gathered ahead of use."""

from __future__ import annotations

from collections.abc import Sequence

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


def forward(residency: Residency, actions: list[Action], order: Sequence[int]) -> list[list[int]]:
    """What is gathered ahead at each use of a forward without gradients, and at its end."""
    ahead, first = [], len(actions)
    residency.begin_pass(has_backward=False)
    for unit in order:
        residency.gather_and_prefetch(unit, in_backward=False)
        residency.release(unit)
        ahead.append([action.unit for action in actions[first:] if isinstance(action, Prefetch)])
        first = len(actions)
    residency.end_forward_pass()
    return [*ahead, [action.unit for action in actions[first:] if isinstance(action, Prefetch)]]


def test_a_forward_is_followed_by_its_first_units_in_whatever_order_it_runs() -> None:
    for numel, every in ((1, [[1], [2], [3], [0], []]), (2, [[2], [3], [0], [1], []])):
        actions: list[Action] = []
        facts = [UnitFacts(name, 1, is_trained=False) for name in "abcd"]
        residency = Residency(facts, PrefetchLimits(numel, 9), actions)
        # The first forward is taken to have the order of registration, and its end is not known.
        assert forward(residency, actions, range(4))[-1] == list(range(numel))
        assert forward(residency, actions, range(4)) == every
        # In another order it costs time, and the next forward has learned it.
        for _ in range(2):
            forward(residency, actions, (3, 2, 1, 0))
        assert forward(residency, actions, (3, 2, 1, 0)) == [[3 - unit for unit in units] for units in every]


def test_what_follows_a_part_of_the_model_that_was_called_by_itself_is_learned() -> None:
    actions: list[Action] = []
    facts = [UnitFacts(name, 1, is_trained=False) for name in "abcd"]
    residency = Residency(facts, PrefetchLimits(1, 9), actions)
    for _ in range(2):  # an encoder, and a decoder for each token
        first = forward(residency, actions, (0, 1))
        tokens = [forward(residency, actions, (2, 3)) for _ in range(3)]
    # The end of a sequence is learned one token late, so the first units of both parts have been read ahead once each.
    assert first == [[1], [], []]
    assert tokens == [[[3], [0], []], [[3], [2], []], [[3], [2], []]]
    for _ in range(2):  # modules that are called one by one
        calls = [forward(residency, actions, [unit]) for unit in range(4)]
    assert calls == [[[1], []], [[2], []], [[3], []], [[0], []]]


def test_an_evaluation_during_a_training_keeps_nothing_for_the_next_one() -> None:
    actions: list[Action] = []
    residency = Residency([UnitFacts(name, 1) for name in "abcd"], PrefetchLimits(1, 9), actions)
    assert forward(residency, actions, range(4)) == [[]] * 5, "nothing is known"
    for _ in range(2):
        assert forward(residency, actions, range(4)) == [[1], [2], [3], [], []]
