"""What stands around the core can be deleted: a model trains and is saved without all of it, and without each part."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import ROOT

TRAIN = """
import sys
# The finder of an editable installation would find what is deleted here.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
import torch
import zeroengine

def train(stage, load):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage}}
    engine = zeroengine.initialize(model, config=config)
    if load:
        engine.load_checkpoint("checkpoints", tag=str(stage))
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 8)).sum())
        engine.step()
    if not load:
        engine.save_checkpoint("checkpoints", tag=str(stage))
    steps = engine.global_steps
    engine.close()
    return steps

for stage in range(4):
    assert train(stage, load=False) == 2
    assert train(stage, load=True) == 4

for keys in ({"zero_optimization": {"stage": "auto"}}, {"snapshots": {"every_seconds": 60, "folder": "snapshots"}}):
    try:
        zeroengine.initialize(torch.nn.Linear(2, 2), config={"optimizer": {"type": "AdamW"}, **keys}).close()
    except zeroengine.ZeroEngineError as error:
        print(error)
"""
PACKAGES = ("plan", "view", "recovery", "integrations", "launch")
# What a setting says that asks for a package that is gone.
MESSAGES = {
    "plan": 'zero_optimization: "auto" needs the package zeroengine.plan, which is not installed. Write a stage, ',
    "recovery": "snapshots.every_seconds needs the package zeroengine.recovery, which is not installed. Write null, ",
}


def run_without(packages: Sequence[str], folder: Path) -> list[str]:
    """Train in a copy of the sources without ``packages``. Return the messages of settings that ask for one of them."""
    shutil.copytree(ROOT / "zeroengine", folder / "zeroengine")
    for package in packages:
        shutil.rmtree(folder / "zeroengine" / package)
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", TRAIN], cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_the_core_trains_without_everything_around_it(tmp_path: Path) -> None:
    auto, snapshots = run_without([*PACKAGES, "cli"], tmp_path)
    assert auto.startswith(MESSAGES["plan"]) and snapshots.startswith(MESSAGES["recovery"])


@pytest.mark.slow
@pytest.mark.parametrize("package", [*PACKAGES, "launch/cluster"])
def test_the_core_trains_without(package: str, tmp_path: Path) -> None:
    messages = run_without([package], tmp_path)
    assert [text.startswith(MESSAGES[package]) for text in messages] == [True] * (package in MESSAGES)
