"""Write numbers of a run for people: durations, rates, bytes and counts."""

from __future__ import annotations

import math

from zeroengine.utils.byte_size import format_byte_size

MISSING = "-"


def format_duration(seconds: float | None) -> str:
    """Return a duration in one or two units: `431 µs`, `1.25 s`, `3 min 20 s`, `2 d 4 h`."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    for scale, unit in ((1e-6, "µs"), (1e-3, "ms")):
        if abs(seconds) < 1000 * scale:
            return f"{seconds / scale:.3g} {unit}" if seconds else "0 s"
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for large, small, large_unit, small_unit in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {large_unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{whole} s"


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
