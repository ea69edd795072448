"""The messages between a launcher and its nodes: lines of JSON over the connection's stdin and stdout.

A node's message begins with MESSAGE_PREFIX. Any other output of the connection was printed by a login script or a
library.
"""

from __future__ import annotations

import json
from typing import Any

MESSAGE_PREFIX = b"\x01zero-launch "
# Heartbeats are sent so often in both directions.
HEARTBEAT_INTERVAL_S = 2.0
# The seconds of silence after which one side gives up the other.
NODE_TIMEOUT_S = 10.0
# The seconds that a whole connection may take, until the node's Python answers.
CONNECT_TIMEOUT_S = 30.0
# The seconds that this Python has to import torch from a cold disk.
IMPORT_TIMEOUT_S = 120.0
# So many nodes are connected to at the same time.
FAN_OUT = 64
# See "Rounds without a step" in restart_loop.py.
MAX_IDLE_ROUNDS = 3

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """Return the line of a message."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes, kind: str) -> Message:
    """Return the message of a line.

    Args:
        line: The line, without a prefix.
        kind: `is` for a message of a node, `do` for one of the launcher.

    Raises:
        ValueError: The line is no message.
    """
    message = json.loads(line)
    if not isinstance(message, dict) or kind not in message:
        raise ValueError(f"not a message: {line[:80]!r}")
    return message


class LineSplitter:
    """Split a stream into lines, in time proportional to its length, however long the lines are."""

    def __init__(self) -> None:
        self._unfinished: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that the data complete, without their ends."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._unfinished, lines[0]])
            self._unfinished.clear()
        if rest:
            self._unfinished.append(rest)
        return lines
