"""Parametrisations that tests share: the transports, and products of which the normal run takes a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

TRANSPORTS = ("shm", "gloo")
EVERY_TRANSPORT = pytest.mark.parametrize("transport", TRANSPORTS)
# For what the engine does above the transport, of which `tests/comm/transports` has the rest.
SHARED_MEMORY_AND_SLOW_GLOO = pytest.mark.parametrize(
    "transport", ["shm", pytest.param("gloo", marks=pytest.mark.slow)]
)


def in_turn(names: tuple[str, str], first: Sequence[Any], second: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by each of `first` with one of `second` in turn; the other pairs are slow.

    Args:
        names: The names of the two arguments.
        first: Values of the first argument, at least as many as of the second. Each value may be a `pytest.param`,
            whose `id` then names it, and whose marks all its pairs have; another value is named by its `__name__` or
            by itself.
        second: Values of the second argument, likewise.
    """
    cases = []
    for i, one in enumerate(map(_parameter, first)):
        for j, other in enumerate(map(_parameter, second)):
            marks = [*one.marks, *other.marks, *([] if i % len(second) == j else [pytest.mark.slow])]
            cases.append(pytest.param(*one.values, *other.values, marks=marks, id=f"{one.id}-{other.id}"))
    return pytest.mark.parametrize(names, cases)


def _parameter(value: Any) -> Any:
    """Return `value` as a parameter that has an id."""
    if isinstance(value, type(pytest.param())):
        return value
    return pytest.param(value, id=str(getattr(value, "__name__", value)))
