"""Checkpoints at another number of ranks, the scaled loss of fp16, and compiled and split models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.environments import run_script
from tests.integrations.lightning.test_trainer import CLOSE, differences

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    folder, script = tmp_path_factory.mktemp("ranks"), Path(__file__).parent / "ranks_script.py"
    (first,) = run_script("lightning", script, [folder, 1], ranks=1)
    return first, run_script("lightning", script, [folder, 2])


def test_a_run_of_one_rank_continues_on_two_at_another_stage(runs: tuple[Any, list[Any]]) -> None:
    first, ranks = runs
    for rank in ranks:
        assert abs(rank["validation"] - first["validation"]) < CLOSE
        # 14 steps on one rank, and the second epoch's 7 on two.
        assert (first["steps"], rank["steps"]) == (14, 21)


@pytest.mark.parametrize("loop", ["trainer", "fabric"])
def test_fp16_trains_as_fp32_does_within_its_precision(runs: tuple[Any, list[Any]], loop: str) -> None:
    for rank in runs[1]:
        assert CLOSE < max(differences(*rank[loop])) < 0.05


@pytest.mark.parametrize("loop", ["trainer", "fabric"])
def test_compiled_models_have_the_same_losses(runs: tuple[Any, list[Any]], loop: str) -> None:
    for rank in runs[1]:
        assert max(differences(rank[loop][0], rank[f"compiled {loop}"])) < CLOSE


def test_ranks_that_hold_one_model_together_get_the_batches_of_one_rank(runs: tuple[Any, list[Any]]) -> None:
    first, ranks = runs
    for rank in ranks:
        assert len(rank["split"]) == 14
        assert max(differences(rank["split"], first["losses"])) < CLOSE
