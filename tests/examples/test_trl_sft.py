from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.examples.framework_example import run_example


@pytest.mark.slow
def test_sft_lowers_the_loss_and_saves_a_whole_model(tmp_path: Path) -> None:
    output = run_example("trl_sft.py", "--steps", 20, "--output", tmp_path)
    first, last = map(float, re.findall(r"loss at first ([\d.]+), at last ([\d.]+)", output)[0])
    assert last < first - 0.5
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (258, 64)
    assert "model.layers.1.mlp.down_proj.weight" in weights and (tmp_path / "config.json").exists()
