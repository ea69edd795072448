"""Write durations for people. This file needs no torch."""

from __future__ import annotations

import math


def format_duration(seconds: float | None) -> str:
    """Return a duration in one or two units: `431 µs`, `1.25 s`, `3 min 20 s`, `2 d 4 h`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
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
