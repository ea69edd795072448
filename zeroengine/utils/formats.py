"""Write numbers of a run for people: rates, bytes and counts."""

from __future__ import annotations

import math

from zeroengine.utils.byte_size import format_byte_size

MISSING = "-"


def counted(count: int, noun: str) -> str:
    """Return a number of things: `1 rank`, `1,024 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_count(number: float | None) -> str:
    """Return a count with three digits and a unit: `950`, `12.3 k`, `1.23 G`."""
    if number is None or not math.isfinite(number):
        return MISSING
    for scale, unit in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def format_share(share: float | None) -> str:
    """Return a share of one as a percentage."""
    return MISSING if share is None else f"{100 * share:.1f} %"


def format_loss(loss: float | None) -> str:
    """Return a loss with four digits."""
    return MISSING if loss is None else f"{loss:.4g}"


def format_memory(nbytes: float | None) -> str:
    """Return bytes in the largest binary unit, rounded."""
    return MISSING if nbytes is None else format_byte_size(round(nbytes))
