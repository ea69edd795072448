"""Training with ZeroAccelerator against accelerate's own DDP, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.environments import run_script

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what the script reports on each rank."""
    return run_script("accelerate", HERE / "training_script.py", [tmp_path_factory.mktemp("states")])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_losses_norms_and_rates_match_ddp_with_a_short_last_step(results: list[dict[str, Any]], stage: int) -> None:
    for of_rank in results:
        # 2 epochs of 7 micro-steps, with a loss and a rate each, and 3 steps, with a norm each.
        assert len(of_rank["ddp"]) == 2 * (7 * 2 + 3)
        assert of_rank[f"stage {stage}"] == pytest.approx(of_rank["ddp"], abs=1e-6, rel=0)


@pytest.mark.parametrize(("saved", "stage"), [(3, 3), (2, 2), (3, 2), (0, 3)])
def test_resumed_training_goes_on_exactly(results: list[dict[str, Any]], saved: int, stage: int) -> None:
    for of_rank in results:
        uninterrupted = of_rank[f"stage {stage}"][17:]
        resumed = of_rank[f"from {saved} at {stage}"]
        if saved == stage or 0 not in (saved, stage):
            assert resumed == uninterrupted
        else:
            # Stage 0 adds micro-steps before ranks.
            assert resumed == pytest.approx(uninterrupted, abs=1e-6, rel=0)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gather_for_metrics_drops_repeated_samples(results: list[dict[str, Any]], stage: int) -> None:
    assert [of_rank[f"evaluation {stage}"] for of_rank in results] == [27, 27]
