"""Call a function at intervals of bytes."""

from __future__ import annotations

from collections.abc import Callable


def call_every(interval_bytes: int, action: Callable[[], None]) -> Callable[[int], None]:
    """Return a function that counts bytes, and calls `action` each time it has counted `interval_bytes` more."""
    pending_bytes = 0

    def count(nbytes: int) -> None:
        nonlocal pending_bytes
        pending_bytes += nbytes
        if pending_bytes >= interval_bytes:
            pending_bytes = 0
            action()

    return count
