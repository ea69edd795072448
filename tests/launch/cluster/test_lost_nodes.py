"""How long an elastic run goes on that loses nodes."""

from __future__ import annotations

from zeroengine.launch.cluster.lost_nodes import ASIDE, IdleRounds, SpoiltRounds


def test_pauses_double_up_to_a_minute_and_a_step_ends_them() -> None:
    idle, pauses = IdleRounds(most=9), []
    for _ in range(8):
        idle.add(stepped=False)
        pauses.append(idle.pause)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60] and not idle.are_too_many
    idle.add(stepped=True)
    assert idle.pause == 0
    for _ in range(9):
        idle.add(stepped=False)
    assert idle.are_too_many


def test_a_node_is_put_aside_for_two_losses_that_are_near_each_other() -> None:
    spoilt = SpoiltRounds()
    assert not spoilt.add("a", 0.0) and not spoilt.add("b", 1.0)
    assert not spoilt.add("a", ASIDE + 1.0)
    assert spoilt.add("a", ASIDE + 2.0)
