"""Lists in messages."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[object], limit: int) -> str:
    """Return the first ``limit`` of ``names``, separated by commas, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(map(str, names[:limit]))}{more}"
