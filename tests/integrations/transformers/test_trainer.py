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
        assert len(expected["loss"]) > 2, case
        for stage, run in runs.items():
            assert run.pop("weights") < TOLERANCE, (case, stage)
            assert run["loss"] == pytest.approx(expected["loss"], rel=0, abs=TOLERANCE), (case, stage)
            assert run["learning_rate"] == expected["learning_rate"], (case, stage)
            # DDP computes the norm in fp32.
            assert run["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6), (case, stage)


@pytest.mark.parametrize("arguments", [("some", 3), pytest.param(("all", 0, 2, 3), marks=pytest.mark.slow)], ids=str)
def test_training_equals_ddp(arguments: tuple[object, ...]) -> None:
    for found in run_script("transformers", HERE / "train_like_ddp.py", arguments):
        check_like_ddp(found)


@pytest.mark.slow
def test_evaluation_resumption_and_weights(tmp_path: Path) -> None:
    for found in run_script("transformers", HERE / "life_of_a_run.py", [tmp_path]):
        assert found["evaluation"]["stage 3"] == pytest.approx(found["evaluation"]["ddp"], abs=2e-6)
        for name, runs in found["resumption"].items():
            first, resumed, elsewhere = (runs[key] for key in ("3 from None", "3 from 3", "1 from 3"))
            assert resumed == first, f"{name}: resumed at the same stage, the run is the same to the last bit"
            assert len(first["losses"]) == 6 and len(set(first["losses"])) == 6
            assert elsewhere["losses"] == pytest.approx(first["losses"], rel=0, abs=TOLERANCE), name
            assert elsewhere["rates"] == first["rates"], name
        assert found["again"] == 9
        weights = found["weights"]
        assert weights["from best"] == 0 and weights["number"] == 30
        # The last epoch is not the best one, so another one was loaded.
        assert weights["loaded"] == pytest.approx(weights["best"], abs=1e-6) and weights["last"] > weights["best"]
    # Another number of ranks has other batches, and continues from the same model.
    alone = run_script("transformers", HERE / "resume_alone.py", [tmp_path / "run-own" / "first"], ranks=1)
    assert alone[0]["steps"] == [4, 5, 6] and alone[0]["eval_loss"] == pytest.approx(
        alone[0]["expected"], abs=TOLERANCE
    )


@pytest.mark.slow
def test_a_run_that_resumes_on_other_numbers_of_ranks_trains_each_sample_once(tmp_path: Path) -> None:
    """transformers by itself skips as many batches as were trained, whatever their samples."""

    def train(kind: str, ranks: int, last: int, first: int = 0) -> list[Any]:
        arguments = [kind, tmp_path / kind, last, first]
        return run_script("transformers", HERE / "resume_data.py", arguments, ranks=ranks)

    # Two samples a rank: the checkpoints are after 20 and 26 of 32 samples.
    runs = {
        kind: [*train(kind, 2, 5), *train(kind, 3, 6, 5), *train(kind, 1, 0, 6)]
        if kind == "zero"
        else [*train(kind, 2, 5), *train(kind, 3, 0, 5)]
        for kind in ("zero", "plain")
    }
    seen = {kind: [sample for rank in ranks for sample in rank["seen"]] for kind, ranks in runs.items()}
    assert sorted(seen["zero"]) == list(range(32))
    assert len(set(seen["plain"])) < 32
    end = runs["zero"][-1]
    assert end["step"] == 5 + 1 + 3 and end["rate"] == 0, "the schedule ends with the data"


@pytest.mark.slow
def test_the_docs_page_runs(tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert run_script("transformers", HERE / "run_docs_page.py", [tmp_path])[0] == 5


@pytest.mark.slow  # the versions are pinned; training, which goes through the seams, is not slow
def test_the_seams_of_transformers_and_accelerate_are_as_they_were() -> None:
    assert run_script("transformers", HERE / "seams.py", ranks=1) == [[]]
