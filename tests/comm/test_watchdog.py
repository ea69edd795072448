"""Where the ranks are, in one sentence."""

from __future__ import annotations

import pytest

from zeroengine.comm.watchdog import Place, describe

GATHER, REDUCE = "gather blocks.4", "reduce blocks.7"
HOSTS = ["node-a", "node-a", "node-b", "node-b"]


@pytest.mark.parametrize(
    ("places", "hosts", "sentence"),
    [
        (
            [Place(True, REDUCE)] * 3 + [Place(False, GATHER)],
            HOSTS,
            "rank 3 (node-b) is at gather blocks.4, the others wait at reduce blocks.7",
        ),
        (
            [Place(True, REDUCE), None, Place(True, REDUCE), Place(True, REDUCE)],
            HOSTS,
            "rank 1 (node-a) does not answer (ended?), the others wait at reduce blocks.7",
        ),
        (
            [Place(False, GATHER)] * 2 + [Place(True, REDUCE)] * 2,
            HOSTS,
            "ranks 0, 1 (node-a) are at gather blocks.4, the others wait at reduce blocks.7",
        ),
        (
            [Place(False, GATHER), Place(True, REDUCE)],
            ["", ""],
            "rank 0 is at gather blocks.4, rank 1 waits at reduce blocks.7",
        ),
        ([Place(True, GATHER)] * 4, HOSTS, "ranks 0, 1 (node-a) and 2, 3 (node-b) wait at gather blocks.4"),
        (
            [None, None, Place(True, GATHER)],
            ["", "", ""],
            "ranks 0, 1 do not answer (ended?), rank 2 waits at gather blocks.4",
        ),
    ],
)
def test_the_odd_ones_come_first_and_the_rest_are_the_others(
    places: list[Place | None], hosts: list[str], sentence: str
) -> None:
    assert describe(dict(enumerate(places)), hosts) == sentence
