"""Parse and format sizes in bytes as people write them: ``5GB``, ``2.0 GiB``. Needs no torch."""

from __future__ import annotations

import re

from pydantic import ByteSize, TypeAdapter

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
    # The form is checked first, because ByteSize takes units of bits, such as "8gbit", and ignores all text after the
    # first number and word: it would read "1,5GB" as one byte.
    nbytes = TypeAdapter(ByteSize).validate_python(str(text)) if _SIZE.fullmatch(str(text)) else 0
    if nbytes < 1:
        raise error(f"{argument} {text}: write a size such as 5GB, 500MB or 2GiB")
    return int(nbytes)


def format_byte_size(nbytes: float) -> str:
    """Return a size in words, in the largest binary unit that keeps it at or above one: ``1.5 GiB``."""
    return ByteSize(nbytes).human_readable(separator=" ")
