"""Errors of one rank that wait for the end of the collectives that all ranks are in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def postponed(errors: list[Exception]) -> Iterator[None]:
    """Keep an error for later, since the other ranks would wait for this one in the next exchange."""
    try:
        yield
    except Exception as error:
        errors.append(error)
