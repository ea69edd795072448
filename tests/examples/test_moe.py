"""The mixture-of-experts example, small, on two ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = "--steps 20 --layers 2 --width 32 --context 32 --batch 4 --experts 4".split()


def losses(stage: int, *arguments: str) -> list[float]:
    """Return the losses that the example prints."""
    command = [sys.executable, "-m", "zeroengine.cli.zero_launch", "--nproc", "2", "--cpu"]
    command += ["--set", "zero_optimization.stage3_param_persistence_threshold=0"]
    command += ["examples/moe.py", "--stage", str(stage), *TINY, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"at stage {stage}" in done.stdout
    assert re.search(r"experts compute [\d.]+% to [\d.]+% of the tokens", done.stdout)
    return [float(number) for number in re.findall(r"loss ([\d.]+) nats", done.stdout)]


@pytest.mark.slow
def test_experts_train_the_same_way_at_every_stage() -> None:
    at_stage_0, at_stage_3 = losses(0), losses(3)
    assert len(at_stage_0) == 10
    assert at_stage_0 == at_stage_3
    assert at_stage_0[-1] < at_stage_0[0] - 0.3


@pytest.mark.slow
def test_experts_that_are_split_train_as_those_that_are_partitioned() -> None:
    assert losses(3, "--expert-ranks", "2") == pytest.approx(losses(3), abs=2e-3)
