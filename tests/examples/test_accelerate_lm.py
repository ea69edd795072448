"""The example with accelerate's loop, small, on two ranks and then on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations.environments import python_of, run_program

ROOT = Path(__file__).resolve().parents[2]
TINY = "--samples 256 --layers 2 --width 32 --context 32 --batch 4 --learning-rate 0.01".split()


def run(stage: int, ranks: int, *arguments: str) -> str:
    """Return what the example prints."""
    command = [str(python_of("accelerate")), "-m", "zeroengine.cli.zero_launch", "--nproc", str(ranks), "--cpu"]
    command += ["--set", "zero_optimization.stage3_param_persistence_threshold=0"]
    command += [str(ROOT / "examples" / "accelerate_lm.py"), "--stage", str(stage), *TINY, *arguments]
    done = run_program(command)
    assert done.returncode == 0, done.stdout[-4000:]
    return str(done.stdout)


def losses(output: str, when: str) -> list[float]:
    return [float(number) for number in re.findall(rf"held-out loss {when} ([\d.]+) nats", output)]


@pytest.mark.slow
def test_it_learns_and_goes_on_at_another_stage_on_another_number_of_ranks(tmp_path: Path) -> None:
    saving = ("--folder", str(tmp_path / "run"))
    first = run(3, 2, *saving, "--epochs", "1")
    assert losses(first, "after")[0] < losses(first, "before")[0] - 0.5
    assert (tmp_path / "run" / "weights" / "model.safetensors").is_file()
    second = run(2, 1, *saving, "--epochs", "2")
    assert "continues with epoch 1" in second
    assert losses(second, "before")[0] == pytest.approx(losses(first, "after")[0], abs=2e-4)
