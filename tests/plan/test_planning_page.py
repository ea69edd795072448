"""The tables in docs/planning.md are what zero-plan prints."""

from __future__ import annotations

import pytest

from tests.plan.planning_page import BLOCK, PAGE, output_of

TABLES = dict(BLOCK.findall(PAGE.read_text()))


def first_candidate(output: str) -> list[str]:
    """Return the cells of the first candidate: number, stage, offload, batch, ...; free and rate come last."""
    lines = output.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("#") or line.startswith(" #"))
    return lines[head + 1].split()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", TABLES)
def test_the_page_shows_the_best_candidate_of_today(arguments: str) -> None:
    shown, today = first_candidate(TABLES[arguments]), first_candidate(output_of(arguments))
    # Memory, rest, seconds and rate depend a little on the version of torch; the others are the choice.
    assert shown[:-4] == today[:-4], "run: python -m tests.plan.planning_page"
    for old, new in zip(shown[-4:], today[-4:], strict=True):
        assert float(new.replace(",", "")) == pytest.approx(float(old.replace(",", "")), rel=0.1)
