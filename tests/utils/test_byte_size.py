"""Sizes as users write them."""

from __future__ import annotations

import pytest

from zeroengine.utils.formats import format_byte_size, parse_byte_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5GB", 5 * 10**9), ("2 GiB", 2**31), ("1.5kb", 1500), ("100", 100), (7, 7), ("3MiB", 3 * 2**20)],
)
def test_sizes_are_read_as_hugging_face_does(text: str | int, expected: int) -> None:
    assert parse_byte_size(text) == expected


@pytest.mark.parametrize(
    "text", ["many", "", "0", "0GB", "5 apples", "1,5GB", "5.5.5GB", "5GB or so", "-5GB", -5, "9" * 400]
)
def test_anything_else_is_refused_with_an_example(text: str | int) -> None:
    with pytest.raises(KeyError, match=r"--size .*: write a size such as 5GB, 500MB or 2GiB"):
        parse_byte_size(text, "--size", KeyError)


def test_sizes_are_shown_in_binary_units() -> None:
    shown = [format_byte_size(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)]
    assert shown == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"]
