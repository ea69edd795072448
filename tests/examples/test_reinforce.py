from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_the_reward_grows_with_a_sampler_in_another_process() -> None:
    launch = [sys.executable, "-m", "zeroengine.cli.zero_launch", "--nproc", "2", "--cpu"]
    command = [*launch, "examples/reinforce.py", "--stage", "3", "--steps", "20"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(value) for value in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert rewards[0] < 0.2 and rewards[-1] > 0.6
