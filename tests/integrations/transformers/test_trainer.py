from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.environments import run_script

HERE = Path(__file__).parent
# Losses are means over fp32 numbers near 4.
TOLERANCE = 1e-6


def check_like_ddp(found: dict[str, Any]) -> None:
    for case, runs in found.items():
        expected = runs.pop("ddp")
        assert len(expected["loss"]) > 5, case
        for stage, run in runs.items():
            assert run.pop("weights") < TOLERANCE, (case, stage)
            assert run["loss"] == pytest.approx(expected["loss"], rel=0, abs=TOLERANCE), (case, stage)
            assert run["learning_rate"] == expected["learning_rate"], (case, stage)
            # DDP computes the norm in fp32.
            assert run["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6), (case, stage)


def test_training_equals_ddp_at_stages_0_2_and_3() -> None:
    for found in run_script("transformers", HERE / "train_like_ddp.py", (0, 2, 3)):
        check_like_ddp(found)


def test_the_docs_page_runs(tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert run_script("transformers", HERE / "run_docs_page.py", [tmp_path])[0] >= 2


def test_the_seams_of_transformers_and_accelerate_are_as_they_were() -> None:
    assert run_script("transformers", HERE / "seams.py", ranks=1) == [[]]
