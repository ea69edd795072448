"""Ranks that share samples or layers, by the names of the Trainer, accelerate and DeepSpeed: the numbers stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.environments import run_script

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_script("transformers", HERE / "parallelism.py")[0]


def test_the_trainer_logs_the_same_numbers(found: dict[str, Any]) -> None:
    runs = found["trainer"]
    expected = runs.pop("alone")
    assert len(expected) > 4 and len(runs) == 4
    for name, run in runs.items():
        assert len(run) == len(expected), name
        for log, other in zip(run, expected, strict=True):
            assert log == pytest.approx(other, rel=1e-6, abs=1e-6), name


def test_an_accelerate_loop_sees_the_same_numbers(found: dict[str, Any]) -> None:
    runs = found["accelerate"]
    expected = runs.pop("alone")
    for name, run in runs.items():
        assert "pass tensors" in run.pop("objects"), name
        # A sample that fills the last batch up is not counted twice.
        assert len(run["predictions"]) == 7 and run["predictions"] == expected["predictions"], name
        assert run["steps"] == expected["steps"], name
        for key in ("losses", "rates", "norms"):
            assert run[key] == pytest.approx(expected[key], rel=2e-6), (name, key)


def test_a_script_for_deepspeeds_alst_trains_as_without_it(found: dict[str, Any]) -> None:
    runs = found["deepspeed"]
    expected = runs.pop("1 at stage 3")
    for name, run in runs.items():
        for key, values in expected.items():
            assert run[key] == pytest.approx(values, rel=1e-6), (name, key)


def test_what_cannot_be_shared_is_refused(found: dict[str, Any]) -> None:
    context, degree, smoothing = found["refusals"]
    assert "ParallelismConfig(cp_size=2): write sp_size" in context
    assert "sequence_parallel_size" in degree and "ParallelismConfig" in degree
    assert "label_smoothing_factor" in smoothing
