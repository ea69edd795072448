"""The transcripts say what a schedule does. A change of the order shows in them."""

from __future__ import annotations

import pytest

from tests.schedule.transcripts import FOLDER, TRANSCRIPTS, text_of


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_the_schedule_does_what_its_transcript_says(name: str) -> None:
    assert text_of(TRANSCRIPTS[name]) == (FOLDER / f"{name}.txt").read_text()


def test_experts_that_a_rank_skips_are_gathered_and_reduced_as_on_the_others() -> None:
    collectives = [
        [line for line in text_of(TRANSCRIPTS[name]).splitlines() if line.strip().startswith(kind)]
        for kind in ("Gather", "Reduce ")
        for name in ("experts_called", "experts_skipped")
    ]
    assert collectives[0] == collectives[1] and collectives[2] == collectives[3]
