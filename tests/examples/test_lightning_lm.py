"""`examples/lightning_lm.py` with a Trainer and with a Fabric, small, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations.environments import ROOT, python_of, run_program

TINY = "--accelerator cpu --steps 6 --schedule-steps 12 --batch 2 --layers 2 --width 16 --context 16".split()


def held_out_loss(*arguments: str) -> float:
    done = run_program([str(python_of("lightning")), str(ROOT / "examples/lightning_lm.py"), *TINY, *arguments])
    match = re.search(r"held-out loss ([\d.]+) after", done.stdout)
    assert done.returncode == 0 and match, done.stdout[-4000:]
    return float(match[1])


@pytest.mark.slow  # test_trainer of the integration compares with DDP
@pytest.mark.parametrize("variant", [[], ["--fabric"]], ids=["trainer", "fabric"])
def test_the_loss_is_that_of_ddp(variant: list[str]) -> None:
    ddp, zero = (held_out_loss("--strategy", name, *variant) for name in ("ddp", "zeroengine_stage_3"))
    assert abs(ddp - zero) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("variant", [[], ["--fabric"]], ids=["trainer", "fabric"])
def test_a_run_continues_at_another_stage(variant: list[str], tmp_path: Path) -> None:
    whole = held_out_loss("--epochs", "2", *variant)
    saving = ["--checkpoint", str(tmp_path / "run"), *variant]
    first = held_out_loss("--strategy", "zeroengine_stage_2", *saving)
    second = held_out_loss("--epochs", "2", *saving)
    assert second == whole < first
