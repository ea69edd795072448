"""A connection that ends says why, however its last words and its end come in."""

from __future__ import annotations

import queue
from typing import Any

from zeroengine.launch.hosts import Host
from zeroengine.launch.link import Link


class Refused:
    """An ssh that nobody answers."""

    name = "ssh"

    def __init__(self, script: str) -> None:
        self._script = script

    def starter(self, host: str) -> list[str]:
        return ["sh", "-c", self._script]


def gone(script: str) -> str:
    events: queue.Queue[tuple[Link, dict[str, Any]]] = queue.Queue()
    link = Link(Host("node-c", 1), Refused(script), {"is": "nothing"}, events)  # type: ignore[arg-type]
    while True:
        _, message = events.get(timeout=30)
        if message["is"] == "gone":
            return link.why_gone(message["code"])


def test_the_reason_is_never_missed() -> None:
    # The end of the output comes before the words on the other pipe: both orders are met in a hundred runs.
    script = "cat >/dev/null & exec >&-; echo connect to host: Connection refused >&2; exit 255"
    assert {gone(script) for _ in range(100)} == {"connect to host: Connection refused"}


def test_a_process_that_is_left_behind_does_not_hold_the_news_up() -> None:
    assert gone("sleep 20 >&- & echo words >&2; exit 255") == "words"
