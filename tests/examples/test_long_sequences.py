"""The example of long sequences, small, on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.integrations.environments import python_of

ROOT = Path(__file__).resolve().parents[2]


def losses(ranks_of_a_sample: int) -> list[float]:
    """Return the losses that the example prints on as many ranks."""
    command = [str(python_of("transformers")), "-m", "zeroengine.cli.zero_launch", "--nproc", str(ranks_of_a_sample)]
    command += ["--cpu", "examples/long_sequences.py", "--steps", "10", "--tokens", "515"]
    command += ["--ranks-of-a-sample", str(ranks_of_a_sample)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(number) for number in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.mark.slow
def test_two_ranks_that_share_each_sample_have_the_losses_of_one() -> None:
    alone, shared = losses(1), losses(2)
    assert len(alone) == 2
    assert shared == pytest.approx(alone, abs=2e-4)
    assert alone[-1] < alone[0] - 0.3
