"""Write numbers, sizes, durations, lists and tables for people, and read sizes. This file needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

# -- sizes -------------------------------------------------------------------------------------------


# pydantic fails on a number of several hundred digits.
_SIZE = re.compile(r"\s*\d{1,18}(\.\d+)?\s*([KMGTP]?B|[KMGTP]iB)?\s*", re.IGNORECASE)


def parse_byte_size(text: str | int, argument: str = "size", error: type[Exception] = ValueError) -> int:
    """Return a size in bytes: ``5GB`` is 5e9, ``5GiB`` is 5 * 2**30, and a number alone counts bytes.

    Args:
        text: The size as the user wrote it.
        argument: The name of the argument, for the message.
        error: The class of the error.

    Raises:
        Exception: `error`, if `text` is no size of at least one byte.
    """
    # Commands such as zero-launch, which import this file and read no size, start without pydantic.
    from pydantic import ByteSize, TypeAdapter

    # The form is checked first, because ByteSize takes units of bits, such as "8gbit", and ignores all text after the
    # first number and word: it would read "1,5GB" as one byte.
    nbytes = TypeAdapter(ByteSize).validate_python(str(text)) if _SIZE.fullmatch(str(text)) else 0
    if nbytes < 1:
        raise error(f"{argument} {text}: write a size such as 5GB, 500MB or 2GiB")
    return int(nbytes)


def format_byte_size(nbytes: float) -> str:
    """Return a size in words, in the largest binary unit that keeps it at or above one: ``1.5 GiB``."""
    from pydantic import ByteSize

    return ByteSize(nbytes).human_readable(separator=" ")


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


# -- durations ---------------------------------------------------------------------------------------


def format_duration(seconds: float | None) -> str:
    """Return a duration in one or two units: `431 µs`, `1.25 s`, `3 min 20 s`, `2 d 4 h`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    for scale, unit in ((1e-6, "µs"), (1e-3, "ms")):
        if abs(seconds) < 1000 * scale:
            return f"{seconds / scale:.3g} {unit}" if seconds else "0 s"
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    rounded = round(seconds)
    for large, small, large_unit, small_unit in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if rounded >= large:
            rest = rounded % large // small
            return f"{rounded // large} {large_unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{rounded} s"


# -- lists in messages -------------------------------------------------------------------------------


def listed(names: Sequence[object], limit: int) -> str:
    """Return the first ``limit`` of ``names``, separated by commas, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(map(str, names[:limit]))}{more}"


# -- numbers -----------------------------------------------------------------------------------------


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


# -- tables ------------------------------------------------------------------------------------------


def aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield lines of columns. The first two columns are names, and the others are numbers."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
