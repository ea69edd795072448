"""A connection that ends says why, however its last words and its end come in."""

from __future__ import annotations

import queue
import shlex
import sys
from typing import Any

from zeroengine.launch.hosts import Host
from zeroengine.launch.link import Link
from zeroengine.launch.wire import MARK


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


def test_a_message_that_was_long_on_its_way_does_not_move_the_node_s_clock() -> None:
    """By which it is decided what failed first."""
    node = f"""
import json, time
for late in (3.0, 0.0, 5.0):
    message = {{"is": "beat" if late < 4 else "ended", "clock": time.monotonic() - 1000.0 - late}}
    print({MARK.decode()!r} + json.dumps(message), flush=True)
"""
    events: queue.Queue[tuple[Link, dict[str, Any]]] = queue.Queue()
    command = f"cat >/dev/null & {sys.executable} -c {shlex.quote(node)}"
    link = Link(Host("node-c", 1), Refused(command), {"is": "nothing"}, events)  # type: ignore[arg-type]
    while events.get(timeout=30)[1]["is"] != "ended":
        pass
    assert 1000.0 <= link.clock < 1002.0
    link.kill()
