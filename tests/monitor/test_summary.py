"""The record names the rank that the others wait for, and why, from the times of the ranks alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zeroengine.monitor.record import KINDS, SPLIT, TRAFFIC
from zeroengine.monitor.summary import CommonFacts, RankRow, find_slowest, summarize

FACTS = CommonFacts(3, 0.0, (0.1,), 2.0, 1.0, False, {})
NO_TRAFFIC = dict.fromkeys(TRAFFIC, 0.0)


def ranks(compute: list[float], offload: list[float], other: list[float], seconds: float) -> dict[str, list[float]]:
    """The times of ranks that wait for the rest of the step."""
    busy = [sum(times) for times in zip(compute, offload, other, strict=True)]
    return {"compute": compute, "offload": offload, "other": other, "wait": [seconds - time for time in busy]}


@pytest.mark.parametrize(
    "compute, offload, other, rank, cause",
    [
        ([0.5, 0.5, 0.9, 0.5], [0.0] * 4, [0.1] * 4, 2, "compute"),
        ([0.5] * 4, [0.1, 0.5, 0.1, 0.1], [0.1] * 4, 1, "offload"),
        ([0.5] * 4, [0.1] * 4, [0.1, 0.1, 0.1, 0.4], 3, "other"),
        ([0.9, 0.4], [0.0] * 2, [0.1] * 2, 0, "compute"),
    ],
)
def test_a_rank_that_waits_less_than_the_others_is_named_with_what_it_did_instead(
    compute: list[float], offload: list[float], other: list[float], rank: int, cause: str
) -> None:
    slowest = find_slowest(ranks(compute, offload, other, 1.05), 1.05, NO_TRAFFIC)
    assert slowest is not None and (slowest.rank, slowest.cause) == (rank, cause)
    assert slowest.seconds == pytest.approx(0.4 if cause != "other" and len(compute) == 4 else slowest.seconds)


def test_a_wait_of_all_ranks_is_the_link_with_its_rate() -> None:
    times = ranks([0.3] * 3, [0.0] * 3, [0.1] * 3, 1.0)
    slowest = find_slowest(times, 1.0, NO_TRAFFIC | {"gather_bytes": 30e6})
    assert slowest is not None and slowest.cause == "link" and "50 MB/s" in slowest.text


def test_a_disk_that_all_ranks_wait_for_is_named() -> None:
    slowest = find_slowest(ranks([0.3] * 2, [0.6] * 2, [0.1] * 2, 1.0), 1.0, NO_TRAFFIC | {"disk_read_bytes": 6e6})
    assert slowest is not None and slowest.cause == "offload" and "10 MB/s" in slowest.text


def test_ranks_that_take_about_the_same_time_name_none() -> None:
    assert find_slowest(ranks([0.8, 0.81, 0.79], [0.0] * 3, [0.1] * 3, 1.0), 1.0, NO_TRAFFIC) is None
    assert find_slowest(ranks([0.9], [0.0], [0.1], 1.0), 1.0, NO_TRAFFIC) is None


def test_a_record_adds_up_over_ranks_and_kinds() -> None:
    layout = RankRow(["a", "b"])
    # "other", then for each kind the work for no unit, for a and for b.
    slots = [0.5, *(float(number) for number in range(1, 1 + 3 * len(KINDS)))]
    given = {"has_loss": 1.0, "loss": 2.0, "loss_weight": 1.0, "samples": 3, "tokens": None}
    given |= {"flops": 10.0, "peak": 7, "device.master": 5}
    rows = np.stack(
        [
            layout.pack(given, slots),
            layout.pack(given | {"loss": 4.0, "loss_weight": 3.0, "device.master": 9}, [2 * s for s in slots]),
        ]
    )
    record = summarize(rows, layout, FACTS, peak_flops=1.0)
    assert (record.loss, record.samples, record.tokens, record.flops) == (3.5, 6, None, 20.0)
    assert list(record.split) == list(SPLIT) and sum(record.split.values()) == pytest.approx(record.seconds)
    assert record.seconds == pytest.approx(1.5 * sum(slots))
    assert record.units["gather"] == [1.5 * 8, 1.5 * 9] and record.split["gather"] == 1.5 * (7 + 8 + 9)
    assert record.memory.device == {"master": 9} and record.memory.peak == 7
    assert record.training_seconds == record.seconds - record.split["checkpoint"] - record.split["evaluation"]
    assert record.mfu == pytest.approx(20.0 / record.training_seconds / 2)


@pytest.mark.parametrize("has_loss, loss, expected", [(1.0, math.nan, math.nan), (0.0, math.nan, None)])
def test_a_loss_that_is_not_a_number_is_told_from_a_loss_that_is_unknown(
    has_loss: float, loss: float, expected: float | None
) -> None:
    layout = RankRow(["a"])
    row = layout.pack({"has_loss": has_loss, "loss": loss, "loss_weight": 1.0}, [0.1] * (1 + 2 * len(KINDS)))
    found = summarize(row[None], layout, FACTS, None).loss
    assert found is None if expected is None else found is not None and math.isnan(found)
