"""How long an elastic run goes on that loses nodes."""

from __future__ import annotations

from zeroengine.launch.cluster.lost_nodes import EXCLUSION_S, IdleRoundCounter, NodeLossHistory


def test_pauses_double_up_to_a_minute_and_a_step_ends_them() -> None:
    idle, pauses = IdleRoundCounter(limit=9), []
    for _ in range(8):
        idle.record_round(stepped=False)
        pauses.append(idle.pause_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60] and not idle.limit_reached
    idle.record_round(stepped=True)
    assert idle.pause_s == 0
    for _ in range(9):
        idle.record_round(stepped=False)
    assert idle.limit_reached


def test_a_node_that_is_lost_twice_in_a_short_time_is_excluded() -> None:
    history = NodeLossHistory()
    assert not history.record_loss("a", 0.0) and not history.record_loss("b", 1.0)
    assert not history.record_loss("a", EXCLUSION_S + 1.0)
    assert history.record_loss("a", EXCLUSION_S + 2.0)
