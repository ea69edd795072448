"""benchmarks/gpu.py without a GPU: it says so; and its sections run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks/gpu.py"


def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=os.environ | settings
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so_and_measures_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = run("--output", str(page))
    assert done.returncode == 2
    assert "there is no GPU that this torch can use, so nothing was measured" in done.stderr
    assert not done.stdout and not page.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "section",
    ["Correctness", "The fused update beside torch", "Norm and cast-copies", "Training", "Offload to CPU memory"],
)
def test_a_section_runs(section: str) -> None:
    done = run("--rehearse", "--section", section)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]).count("\n| ") >= 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: the GPU cannot be compiled")
@pytest.mark.parametrize(
    "section",
    [
        *("Correctness", "The fused update", "The fused update beside torch", "Norm and cast-copies", "Training"),
        *("Memory", "The largest model"),
    ],
)
def test_a_section_runs_on_a_gpu_that_the_cpu_plays(section: str) -> None:
    done = run("--rehearse", "--section", section, PYTHONPATH=f"{ROOT}:{ROOT / 'tests/emulated/start'}")
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout.splitlines()[-1])
    assert ("G parameters" in page or page.count("\n| ") >= 2) and "failed" not in page


@pytest.mark.slow
def test_a_section_that_fails_is_reported_and_the_others_go_on() -> None:
    """With no time left every one is."""
    done = run("--rehearse", "--minutes", "0")
    assert done.returncode == 1
    assert done.stdout.count("## ") == done.stdout.count("no time was left") >= 10
