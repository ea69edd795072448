"""The example of a model that is larger than the memory of its process: it trains, and torch alone cannot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--memory-mib 200 --layers 24 --width 384 --context 32 --batch 1 --steps 4".split()


def run(disk: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "examples/larger_than_memory.py", "--nvme", str(disk), *SMALL, *arguments]
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, env={**os.environ, **settings}
    )


@pytest.mark.slow
def test_a_model_trains_whose_states_are_larger_than_its_memory(disk: Path) -> None:
    done = run(disk)
    assert done.returncode == 0, done.stderr[-4000:]
    numbers = re.search(r"states of ([\d,]+) MiB, 200 MiB allowed", done.stdout)
    assert numbers is not None and int(numbers[1].replace(",", "")) > 600
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4 and losses[2] < losses[0] and losses[3] < losses[1]


@pytest.mark.slow
def test_torch_alone_is_ended(disk: Path) -> None:
    done = run(disk, "--plain")
    assert done.returncode == 137, done.stderr[-2000:]
    assert "out of memory" in done.stderr
