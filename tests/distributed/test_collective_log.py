"""Every rank launches the same collectives in the same order on each channel, and a log shows where one does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.collective_log import (
    CHANNELS,
    KINDS,
    RankLog,
    Scenario,
    between_ranks,
    between_versions,
    problems_of,
    record,
    record_on_rank,
    scenarios_of,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.test_experts import TRANSPORTS
from zeroengine.runtime.reduce_launcher import ReduceLauncher

HARDEST = (
    "no experts in two losses",
    "reentrant layers without their experts",
)
STYLES = [Scenario("styles", name, 3, 0, "shm", steps=4) for name in HARDEST]
# The router is in a unit that is gathered anyway, and only some ranks have a backward of it. What is gathered ahead
# must not depend on that.
PREFETCHED = Scenario("styles", "no experts on some ranks", 3, 10**6, "nccl", steps=4)
# All of its units are equally large, and its transport compares nothing before the end of a step.
LOOP = Scenario("losses", "engine.backward 0", 3, 0, "nccl", steps=2)
Variants = dict[str, list[RankLog]]  # by scenario, or by what rank 1 does otherwise: each rank's log


def hold_first_reduce(patch: pytest.MonkeyPatch, direction: int) -> None:
    """Launch the first reduce of this rank with the second one: before that (1), or after that (-1)."""
    launch: Callable[..., None] = ReduceLauncher.launch
    held: list[Any] = []

    def launch_later(reduces: ReduceLauncher, unit_grads: Any) -> None:
        held.append(unit_grads)
        if len(held) > 1:
            for unit in held[::direction] if len(held) == 2 else held[-1:]:
                launch(reduces, unit)

    patch.setattr(ReduceLauncher, "launch", launch_later)


def record_variants() -> list[RankLog]:
    """The logs of this rank."""
    logs = record_on_rank([*STYLES, PREFETCHED, LOOP])
    for direction in (1, -1):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                hold_first_reduce(patch, direction)
            logs += record_on_rank([LOOP])
    return logs


@pytest.fixture(scope="module")
def variants() -> Variants:
    names = [*HARDEST, "prefetched", "loop", "late reduce", "swapped reduces"]
    logs = zip(*run_ranks(3, record_variants, timeout=120.0), strict=True)
    return {name: list(ranks) for name, ranks in zip(names, logs, strict=True)}


@pytest.mark.parametrize("name", [*HARDEST, "prefetched", "loop"])
def test_ranks_launch_the_same_collectives_in_one_order(variants: Variants, name: str) -> None:
    assert not between_ranks(variants[name])
    for log in variants[name]:
        assert not log.error and all(map(log.of_channel, CHANNELS)) and log.losses


def test_a_reduce_that_one_rank_launches_late_is_noticed(variants: Variants) -> None:
    # Each channel has its order, and so nothing but the two together shows that a rank may wait for this one.
    before, after = variants["loop"], variants["late reduce"]
    assert not between_ranks(after) and between_ranks(after, merged=True)
    (difference,) = between_versions(before, after)
    assert difference.startswith("rank 1 only in the order of both channels together, at launch")
    assert [log.losses for log in before] == [log.losses for log in after]


def test_reduces_that_one_rank_swaps_are_noticed(variants: Variants) -> None:
    first, second = variants["loop"][0].of_channel("reduce")[:2]
    differences = between_ranks(variants["swapped reduces"])
    assert [text.partition(" at")[0] for text in differences] == ["ranks 0 and 1"]
    assert f">> {first}, {second}" in differences[0] and f">> {second}, {first}" in differences[0]
    assert any(
        text.startswith("rank 1 at launch") for text in between_versions(variants["loop"], variants["swapped reduces"])
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "transport"), list(zip(KINDS, TRANSPORTS, strict=True)))
def test_ranks_launch_the_same_collectives_in_every_scenario(kind: str, transport: str) -> None:
    problems = problems_of(record(scenarios_of(kind, transport), 3))
    assert not problems, "\n".join(problems)
