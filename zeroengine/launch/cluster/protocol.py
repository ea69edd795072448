"""What a launcher and its nodes say to each other: lines of JSON over the connection's stdin and stdout.

A line from a node begins with MARK. Any other line there is what a login script or a library printed.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

MARK = b"\x01zero-launch "
BEAT = 2.0  # seconds between two signs of life, both ways
SILENCE = 10.0  # seconds without one after which the other side is given up

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes, kind: str) -> Message:
    """
    Args:
        kind: `is` for what a node says, `do` for what the launcher does.

    Raises:
        ValueError: the line is no message.
    """
    message = json.loads(line)
    if not isinstance(message, dict) or kind not in message:
        raise ValueError(f"not a message: {line[:80]!r}")
    return message


def to_text(data: bytes) -> str:
    """Bytes as JSON can carry them."""
    return data.decode("latin-1")


def to_bytes(text: str) -> bytes:
    return text.encode("latin-1")


class Lines:
    """Cuts a stream into lines, in time proportional to its length however long they are."""

    def __init__(self) -> None:
        self._unfinished: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that the data complete, without their ends."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._unfinished, lines[0]])
            self._unfinished.clear()
        if rest:
            self._unfinished.append(rest)
        return lines


class Writer:
    """The sending end, for several threads. What nobody reads any more is dropped: the receiving end will notice."""

    def __init__(self, fd: int, mark: bytes = b"") -> None:
        self._fd, self._mark, self._lock = fd, mark, threading.Lock()

    def send(self, message: Message) -> None:
        self.write(self._mark + encode(message))

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            with self._lock:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
        except OSError:
            pass

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
