from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.framework_example import run_example


@pytest.mark.slow
def test_dpo_lowers_the_loss_with_two_engines(tmp_path: Path) -> None:
    output = run_example("trl_dpo.py", "--steps", 30, "--output", tmp_path)
    first, last = map(float, re.findall(r"loss at first ([\d.]+), at last ([\d.]+)", output)[0])
    assert last < first - 0.02
    assert (tmp_path / "model.safetensors").stat().st_size > 400_000
