"""Nested mappings as flat ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flat_items(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings that are no mappings, with their keys joined by dots after ``prefix``."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
