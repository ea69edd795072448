"""`Trainer(strategy="zeroengine")` trains as under Lightning's DDP, resumes exactly, and refuses what it cannot do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.environments import python_of, run_program, run_script

HERE = Path(__file__).parent
CLOSE = 1e-6


def differences(first: list[float], second: list[float]) -> list[float]:
    return [abs(a - b) / max(1.0, abs(a)) for a, b in zip(first, second, strict=True)]


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_script("lightning", HERE / "trainer_script.py", [tmp_path_factory.mktemp("fits"), "3"])


@pytest.fixture(scope="module")
def other_fits(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_script("lightning", HERE / "trainer_script.py", [tmp_path_factory.mktemp("fits"), "0", "2"])


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_script("lightning", HERE / "trainer_features_script.py", [tmp_path_factory.mktemp("features")])


def fits_at(stage: int, request: pytest.FixtureRequest) -> list[Any]:
    found: list[Any] = request.getfixturevalue("fits" if stage == 3 else "other_fits")
    return found


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2)), 3])
def test_losses_and_validation_are_those_of_ddp_with_a_short_last_window(
    stage: int, request: pytest.FixtureRequest
) -> None:
    for rank in fits_at(stage, request):
        found = rank[f"stage {stage}"]
        assert max(differences(rank["ddp"]["losses"], found["losses"])) < CLOSE
        assert max(differences(rank["ddp"]["validation"], found["validation"])) < CLOSE
        assert found["steps"] == rank["ddp"]["steps"] == 8


def test_a_schedule_by_epoch_steps_as_under_ddp(fits: list[Any]) -> None:
    for rank in fits:
        by_step, by_epoch = rank["ddp"]["losses"], rank["ddp by epoch"]["losses"]
        assert max(differences(by_step, by_epoch)) > CLOSE
        assert max(differences(by_epoch, rank["stage 3 by epoch"]["losses"])) < CLOSE


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_fit_resumes_bit_for_bit_at_the_same_and_another_stage(stage: int, request: pytest.FixtureRequest) -> None:
    for rank in fits_at(stage, request):
        resumed = rank["resume"][f"stage {stage}"]
        assert resumed["losses"] == rank["resume"]["full"]["losses"][-14:]
        assert resumed["validation"] == rank["resume"]["full"]["validation"][-len(resumed["validation"]) :]


def test_after_fit_the_model_is_saved_tested_and_released(fits: list[Any]) -> None:
    for rank in fits:
        found = rank["after fit"]
        assert Path(found["best"]).name in found["folders"] and len(found["folders"]) == 3
        assert found["weights agree"] and found["released agrees"] and found["predictions agree"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["Adversarial", "ByHand", "deferred", "ema", "swa", "optimizer"])
def test_other_ways_of_training_have_the_losses_of_ddp(features: list[Any], case: str) -> None:
    for rank in features:
        assert max(differences(*rank[case])) < CLOSE


@pytest.mark.slow
def test_precision_of_the_trainer_fills_in_the_configuration(features: list[Any]) -> None:
    for rank in features:
        assert rank["bf16"][0] == rank["bf16"][1]
        assert max(differences(rank["bf16"][0], rank["deferred"][0])) > 1e-3


@pytest.mark.slow
def test_an_average_of_the_weights_resumes(features: list[Any]) -> None:
    for rank in features:
        assert rank["average resumed"]["whole"] == rank["average resumed"]["resumed"]


@pytest.mark.slow
def test_a_file_of_ddp_is_tested_and_not_resumed_from(features: list[Any]) -> None:
    for rank in features:
        first, second = rank["file"]["tested"]
        assert abs(first - second) < CLOSE
        of_file, of_folder = rank["file"]["errors"]
        assert "model.load_state_dict(torch.load(path" in of_file
        assert "there is no checkpoint in the folder" in of_folder and "or None to start anew" in of_folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("precision", r'precision="16-true"\), and the configuration has "bf16".*Leave precision= out'),
        ("no precision", r'has no precision.*write "bf16": {"enabled": true}'),
        ("double", r"Leave precision= out"),
        ("stage", r'zero_optimization.stage is 2.*Write strategy="zeroengine"'),
        ("steps", r"gradient_accumulation_steps is 4.*accumulate_grad_batches=1"),
        ("clip", r"gradient_clip_val=1.0.*gradient_clipping is 0.5.*Write one"),
        ("values", r'Write gradient_clip_algorithm="norm"'),
        ("average", r"Use stage 0, 1 or 2.*docs/averages.md"),
        ("no optimizer", r'write such as "optimizer"'),
        ("argument", r"find_unused_parameters.*Leave them out"),
    ],
)
def test_what_contradicts_the_configuration_is_refused(features: list[Any], case: str, message: str) -> None:
    for rank in features:
        assert re.search(message, rank["errors"][case])


@pytest.mark.slow
def test_every_launcher_starts_the_same_run() -> None:
    python, script = str(python_of("lightning")), str(HERE / "launched_script.py")
    launch = "from zeroengine.cli.zero_launch import main; import sys; sys.exit(main())"
    commands = [
        [python, script, "zeroengine_stage_3"],
        [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, "zeroengine_stage_3"],
        [python, "-c", launch, "--nproc", "2", "--set", "zero_optimization.stage=3", script, "zeroengine"],
    ]
    found = []
    for command in commands:
        done = run_program(command)
        match = re.search(r"FOUND (\{.*\})", done.stdout)
        assert match, done.stdout[-4000:]
        found.append(json.loads(match[1]))
    assert found[0]["world size"] == 2 and len(found[0]["losses"]) == 7
    assert found[0] == found[1] == found[2]


@pytest.mark.slow  # the versions are pinned; fits, which go through the seams, are not slow
def test_the_seams_of_lightning_are_as_this_integration_needs_them() -> None:
    done = run_program([str(python_of("lightning")), str(HERE / "seams_script.py")])
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_the_docs_page_runs(tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert run_script("lightning", HERE / "docs_script.py", [tmp_path]) == [5, 5]
