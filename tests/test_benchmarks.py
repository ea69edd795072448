"""benchmarks/gpu.py without a GPU: it says so; and its parts run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks/gpu.py"


def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=os.environ | settings
    )


def result_of(done: subprocess.CompletedProcess[str]) -> Any:
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("result of"))
    return json.loads(line.partition(": ")[2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so_and_measures_nothing(tmp_path: Path) -> None:
    done = run("--output", str(tmp_path / "report"))
    assert done.returncode == 2
    assert "there is no GPU that this torch can use, so nothing was measured" in done.stderr
    assert not done.stdout and not (tmp_path / "report").exists()


@pytest.mark.slow  # distributed/test_stages has the bits
def test_stage_3_on_one_rank_of_many_has_the_bits_of_stage_0() -> None:
    """What the benchmark does on a GPU over NCCL: here Gloo brings what the other ranks would send."""
    done = run("--dry-run", "--part", "Stage 3 beside stage 0")
    assert done.returncode == 0, done.stderr
    text, answers = result_of(done)
    assert text.startswith("3 of 3 losses (the first is 4.") and answers == [1.0]


@pytest.mark.slow
def test_every_question_has_an_answer_or_a_reason_without_a_gpu(tmp_path: Path) -> None:
    done = run("--dry-run", "--output", str(tmp_path))
    rows = [line.split(" | ") for line in (tmp_path / "answers.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 15 and all(row[2] for row in rows), rows
    assert [row[3].strip(" |") for row in rows[2:4]] == ["yes", "yes"]
    # There is no GPU, so some questions have a reason, and nothing has failed.
    assert done.returncode == 1 and "failed" not in (tmp_path / "answers.md").read_text()
    assert not (tmp_path / "failures.txt").read_text()
    assert (tmp_path / "details.md").read_text().count("\n## ") == 13


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: the GPU cannot be compiled")
@pytest.mark.parametrize(
    "part",
    [
        *("Correctness", "The fused update", "The fused update beside torch", "Norm and cast-copies", "Training"),
        *("Memory", "The largest model", "Checkpoints"),
    ],
)
def test_a_part_runs_on_a_gpu_that_the_cpu_plays(part: str) -> None:
    done = run("--dry-run", "--part", part, PYTHONPATH=f"{ROOT}:{ROOT / 'tests/emulated/start'}")
    assert done.returncode == 0, done.stderr
    text, answers = result_of(done)
    assert text
    if part == "Training":  # FSDP2 and NCCL have no emulation
        answers = answers[2:3]
    assert not any(isinstance(answer, str) for answer in answers), answers


def test_a_part_that_fails_leaves_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    """With no time left every one does."""
    done = run("--dry-run", "--minutes", "0", "--output", str(tmp_path))
    assert done.returncode == 1
    answers = (tmp_path / "answers.md").read_text()
    assert answers.count("no time was left") == 15 and answers in done.stdout
    assert (tmp_path / "failures.txt").read_text().count("==\n") == 13
