"""A connection that ends says why, however its last words and its end come in; and what is said over it arrives."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator

import pytest

from tests.launch.processes import wait_for
from zeroengine.launch.cluster.connections import BACKLOG, Connections
from zeroengine.launch.cluster.hosts import Host
from zeroengine.launch.cluster.node_connection import Link
from zeroengine.launch.cluster.protocol import MARK, Lines, Message


class Refused:
    """An ssh that nobody answers."""

    name = "ssh"

    def __init__(self, script: str) -> None:
        self._script = script

    def starter(self, host: str) -> list[str]:
        return ["sh", "-c", self._script]


@pytest.fixture
def connections() -> Iterator[Connections]:
    connections = Connections()
    yield connections
    connections.close()


def connect(connections: Connections, script: str) -> Link:
    link = Link(Host("node-c", 1), Refused(script), {"is": "nothing"}, connections)  # type: ignore[arg-type]
    link.connect()
    return link


def take(connections: Connections, kind: str) -> Message:
    """The next message of that kind."""
    while True:
        link, message, size = connections.events.get(timeout=30)
        link.taken(size)  # type: ignore[attr-defined]
        if message["is"] == kind:
            return message


def gone(connections: Connections, script: str) -> str:
    link = connect(connections, script)
    return link.why_gone(take(connections, "gone")["code"])


def test_the_reason_is_never_missed(connections: Connections) -> None:
    # The end of the output comes before the words on the other pipe: both orders are met in a hundred runs.
    script = "cat >/dev/null & exec >&-; echo connect to host: Connection refused >&2; exit 255"
    assert {gone(connections, script) for _ in range(100)} == {"connect to host: Connection refused"}


def test_a_process_that_is_left_behind_does_not_hold_the_news_up(connections: Connections) -> None:
    assert gone(connections, "sleep 20 >&- & echo words >&2; exit 255") == "words"


def test_a_message_that_was_long_on_its_way_does_not_move_the_node_s_clock(connections: Connections) -> None:
    """By which it is decided what failed first."""
    node = f"""
import json, time
for late in (3.0, 0.0, 5.0):
    message = {{"is": "beat" if late < 4 else "ended", "clock": time.monotonic() - 1000.0 - late}}
    print({MARK.decode()!r} + json.dumps(message), flush=True)
"""
    link = connect(connections, f"cat >/dev/null & {sys.executable} -c {shlex.quote(node)}")
    take(connections, "ended")
    assert 1000.0 <= link.clock < 1002.0
    link.kill()


def test_a_message_is_found_behind_text_without_a_line_s_end(connections: Connections) -> None:
    """As a .bashrc may print it."""
    message = MARK.decode() + '{"is": "hello"}'
    broken = [MARK.decode() + rest for rest in ("{", "5", "{}", '{"do": "beat"}')]
    lines = "".join(f"; echo {shlex.quote(line)}" for line in [message, *broken])
    link = connect(connections, f"printf 'no end '{lines}")
    assert take(connections, "text")["text"] == "no end"
    assert take(connections, "hello")["is"] == "hello"
    assert [take(connections, "text")["text"] for _ in broken] == broken
    link.kill()


def test_a_node_that_does_not_read_holds_nobody_up(connections: Connections) -> None:
    link = connect(connections, "sleep 60")
    began = time.monotonic()
    for _ in range(10):
        link.send({"do": "x" * 1_000_000})
    assert time.monotonic() - began < 1.0
    link.kill()


def test_a_node_that_floods_is_not_read_from_until_the_launcher_has_taken_what_came(connections: Connections) -> None:
    flood = connect(connections, "yes $(printf %01000d 0)")
    other = connect(connections, f'while sleep 0.1; do echo \'{MARK.decode()}{{"is": "beat"}}\'; done')
    wait_for(lambda: flood._connection is not None and flood._connection.is_full, 10)
    taken, held = 0, time.monotonic()
    wait_for(lambda: other.heard > held, 10)  # while the flood waits
    waiting = connections.events.qsize()
    time.sleep(0.3)
    assert connections.events.qsize() == waiting and waiting < 2 * BACKLOG
    while taken < 2 * BACKLOG:  # and it goes on
        link, _, size = connections.events.get(timeout=10)
        link.taken(size)  # type: ignore[attr-defined]
        taken += size
    for link in (flood, other):
        link.kill()


def test_a_long_line_takes_time_proportional_to_its_length() -> None:
    lines, began = Lines(), time.monotonic()
    for _ in range(1000):
        assert lines.feed(b"x" * (1 << 16)) == []
    assert lines.feed(b"y\nz") == [b"x" * (1000 << 16) + b"y"] and lines.feed(b"\n") == [b"z"]
    assert time.monotonic() - began < 3.0
