from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.examples.framework_example import run_example


@pytest.mark.slow
def test_the_adapter_lowers_the_held_out_loss_and_is_saved_alone(tmp_path: Path) -> None:
    output = run_example("transformers_lora.py", "--steps", 12, "--output", tmp_path)
    before, after = map(float, re.findall(r"held-out loss before ([\d.]+), after ([\d.]+)", output)[0])
    assert after < before - 0.05
    assert all(".lora_" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 8
