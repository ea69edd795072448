"""What zero-report says to its earlier options. tests/launch/schedulers/test_schedulers.py has a report."""

from __future__ import annotations

import pytest

from zeroengine.cli.zero_report import main


@pytest.mark.parametrize("option", ["--no-probes", "--disk=/", "--run=runs/a"])
def test_what_measures_and_shows_instead_is_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 2
    error = capsys.readouterr().err
    assert "zero-io DIR" in error and "zero-plan --measure" in error and "zero-view RUN --html FILE" in error
