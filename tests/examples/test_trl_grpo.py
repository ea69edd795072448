from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.framework_example import run_example


@pytest.mark.slow
def test_grpo_raises_the_reward_with_a_partitioned_policy(tmp_path: Path) -> None:
    output = run_example("trl_grpo.py", "--steps", 20, "--output", tmp_path)
    first, last = map(float, re.findall(r"reward at first ([\d.]+), at last ([\d.]+)", output)[0])
    assert last > first + 0.1
    assert (tmp_path / "model.safetensors").stat().st_size > 400_000
