"""How long an elastic run goes on that loses nodes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from zeroengine.launch.cluster.restart_loop import EXCLUSION_S, RestartLoop, pause_after


def test_pauses_double_up_to_a_minute() -> None:
    assert [pause_after(count) for count in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_node_that_is_lost_twice_in_a_short_time_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    excluded = []
    unused: Any = SimpleNamespace(print_notice=lambda _: None)
    loop = RestartLoop(unused, unused, unused, unused)
    for now, label in ((0.0, "a"), (1.0, "b"), (EXCLUSION_S + 1.0, "a"), (EXCLUSION_S + 2.0, "a")):
        node: Any = SimpleNamespace(
            host=SimpleNamespace(label=label), retry_after=lambda _, event=(now, label): excluded.append(event)
        )
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        loop._exclude_unsteady([node])
    assert excluded == [(EXCLUSION_S + 2.0, "a")]
