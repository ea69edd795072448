"""A connection that ends says why, however its last words and its end come in; and what is said over it arrives."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator

import pytest

from tests.launch.processes import wait_for
from zeroengine.launch.cluster.connections import MAX_BACKLOG_BYTES, ConnectionThread
from zeroengine.launch.cluster.hosts import Host
from zeroengine.launch.cluster.node_connection import NodeConnection
from zeroengine.launch.cluster.protocol import MESSAGE_PREFIX, LineSplitter, Message


class ShellStandIn:
    """A shell that runs a script here instead of a command on a host."""

    name = "ssh"

    def __init__(self, script: str) -> None:
        self._script = script

    def starter(self, host: str) -> list[str]:
        return ["sh", "-c", self._script]


@pytest.fixture
def connections() -> Iterator[ConnectionThread]:
    connections = ConnectionThread()
    yield connections
    connections.close()


def connect(connections: ConnectionThread, script: str) -> NodeConnection:
    node = NodeConnection(Host("node-c", 1), ShellStandIn(script), {"is": "nothing"}, connections)  # type: ignore[arg-type]
    node.connect()
    return node


def take(connections: ConnectionThread, kind: str) -> Message:
    """The next message of that kind."""
    while True:
        _, message, acknowledge = connections.events.get(timeout=30)
        acknowledge()
        if message["is"] == kind:
            return message


def gone(connections: ConnectionThread, script: str) -> str:
    node = connect(connections, script)
    return node.describe_end(take(connections, "gone")["code"])


def test_the_reason_is_never_missed(connections: ConnectionThread) -> None:
    # The end of the output comes before the words on the other pipe: both orders are met in a hundred runs.
    script = "cat >/dev/null & exec >&-; echo connect to host: Connection refused >&2; exit 255"
    assert {gone(connections, script) for _ in range(100)} == {"connect to host: Connection refused"}


def test_a_process_that_is_left_behind_does_not_hold_the_news_up(connections: ConnectionThread) -> None:
    assert gone(connections, "sleep 20 >&- & echo words >&2; exit 255") == "words"


def test_a_message_that_was_long_on_its_way_does_not_move_the_node_s_clock(connections: ConnectionThread) -> None:
    """By which it is decided what failed first."""
    program = f"""
import json, time
for late in (3.0, 0.0, 5.0):
    message = {{"is": "beat" if late < 4 else "ended", "clock": time.monotonic() - 1000.0 - late}}
    print({MESSAGE_PREFIX.decode()!r} + json.dumps(message), flush=True)
"""
    node = connect(connections, f"cat >/dev/null & {sys.executable} -c {shlex.quote(program)}")
    take(connections, "ended")
    assert 1000.0 <= node.clock_offset_s < 1002.0
    node.kill()


def test_a_message_is_found_behind_text_without_a_line_s_end(connections: ConnectionThread) -> None:
    """As a .bashrc may print it."""
    message = MESSAGE_PREFIX.decode() + '{"is": "hello"}'
    broken = [MESSAGE_PREFIX.decode() + rest for rest in ("{", "5", "{}", '{"do": "beat"}')]
    lines = "".join(f"; echo {shlex.quote(line)}" for line in [message, *broken])
    node = connect(connections, f"printf 'no end '{lines}")
    assert take(connections, "text")["text"] == "no end"
    assert take(connections, "hello")["is"] == "hello"
    assert [take(connections, "text")["text"] for _ in broken] == broken
    node.kill()


def test_a_node_that_does_not_read_holds_nobody_up(connections: ConnectionThread) -> None:
    node = connect(connections, "sleep 60")
    start = time.monotonic()
    for _ in range(10):
        node.send({"do": "x" * 1_000_000})
    assert time.monotonic() - start < 1.0
    node.kill()


def test_a_node_that_floods_is_not_read_from_until_the_launcher_has_taken_what_came(
    connections: ConnectionThread,
) -> None:
    flood = connect(connections, "yes $(printf %01000d 0)")
    other = connect(connections, f'while sleep 0.1; do echo \'{MESSAGE_PREFIX.decode()}{{"is": "beat"}}\'; done')
    wait_for(lambda: flood._connection is not None and flood._connection.is_full, 10)
    handled, held = 0, time.monotonic()
    wait_for(lambda: other.last_heard > held, 10)  # while the flood waits
    waiting = connections.events.qsize()
    time.sleep(0.3)
    assert connections.events.qsize() == waiting and waiting < 2 * MAX_BACKLOG_BYTES
    while handled < 2 * MAX_BACKLOG_BYTES:  # and it goes on
        _, message, acknowledge = connections.events.get(timeout=10)
        acknowledge()
        handled += len(message["text"])
    for node in (flood, other):
        node.kill()


def test_a_long_line_takes_time_proportional_to_its_length() -> None:
    lines, start = LineSplitter(), time.monotonic()
    for _ in range(1000):
        assert lines.feed(b"x" * (1 << 16)) == []
    assert lines.feed(b"y\nz") == [b"x" * (1000 << 16) + b"y"] and lines.feed(b"\n") == [b"z"]
    assert time.monotonic() - start < 3.0
