"""What long work says."""

from __future__ import annotations

import time

import pytest

from zeroengine.utils import progress as module
from zeroengine.utils.formats import format_duration
from zeroengine.utils.progress import progress


def test_long_work_without_a_terminal_prints_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    with progress("saving step-9", 100 << 20) as report:
        for _ in range(100):
            seconds += 1.0
            report(1 << 20)
    lines = capsys.readouterr().err.splitlines()
    # A line after 10 seconds, and one every 30 seconds.
    assert lines[0] == "saving step-9: 10 % (10.0 MiB of 100.0 MiB), 1 min 30 s to go"
    assert len(lines) == 3 and lines[-1].startswith("saving step-9: 70 %")


def test_short_work_and_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for shown, first_line_s in ((True, module.FIRST_LINE_S), (False, 0.0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "FIRST_LINE_S", first_line_s)
            with progress("loading", 10, shown) as report:
                report(5)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (4.31e-4, "431 µs"),
        (0.0125, "12.5 ms"),
        (1.25, "1.25 s"),
        (59.99, "60 s"),
        (200.0, "3 min 20 s"),
        (3600.0, "1 h"),
        (187_200.0, "2 d 4 h"),
        (None, "-"),
        (float("inf"), "-"),
    ],
)
def test_durations_have_at_most_two_units(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text
