"""`Fabric(strategy="zeroengine")` trains as under Lightning's DDP, and `fabric.save` and `fabric.load` resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.environments import run_script
from tests.integrations.lightning.test_trainer import CLOSE, differences

pytestmark = pytest.mark.slow  # test_trainer has the same strategy


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("loops")
    return run_script("lightning", Path(__file__).parent / "fabric_script.py", [folder])


@pytest.mark.parametrize("case", ["stage 0", "stage 2", "stage 3", "by name", "apart"])
def test_losses_and_norms_are_those_of_ddp(loops: list[Any], case: str) -> None:
    for rank in loops:
        assert max(differences(rank["ddp"], rank[case])) < CLOSE


def test_two_models_that_train_each_other_have_the_losses_of_ddp(loops: list[Any]) -> None:
    for rank in loops:
        assert max(differences(rank["adversarial"]["ddp"], rank["adversarial"]["stage 3"])) < CLOSE


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_several_backwards_outside_of_no_backward_sync_add_up(loops: list[Any], stage: int) -> None:
    for rank in loops:
        assert max(differences(rank["uneven"]["ddp"], rank["uneven"][f"stage {stage}"])) < CLOSE


def test_a_loop_resumes_bit_for_bit_at_the_same_and_another_stage(loops: list[Any]) -> None:
    for rank in loops:
        assert rank["resume"]["stage 2"] == rank["resume"]["stage 3"] == rank["resume"]["full"]


def test_checkpoints_and_files_are_loaded_for_evaluation(loops: list[Any]) -> None:
    assert all(rank["evaluated"] for rank in loops)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("two optimizers", "Set up each part with its own"),
        ("steps", "Leave the key out of the configuration"),
        ("schedule", "Remove the section"),
        ("values", "Write max_norm="),
        ("norm", "the engine clips the 2-norm"),
        ("optimizer", "belongs to no engine|waits for this SGD"),
        ("folder without a model", "Pass the model that was set up"),
        ("file", "is a file, and a checkpoint of zeroengine is a folder"),
        ("remote", "is no folder of this machine"),
        ("filter", "save_weights"),
    ],
)
def test_what_cannot_be_done_is_refused(loops: list[Any], case: str, message: str) -> None:
    for rank in loops:
        assert any(part in rank["errors"][case] for part in message.split("|")), rank["errors"][case]
