from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.environments import run_script

SCRIPT = Path(__file__).with_name("qlora.py")


@pytest.mark.slow  # tests/distributed/test_quantized_parameters.py has imitations of the libraries
@pytest.mark.parametrize("kind", ["4 bits", "8 bits", "torchao"])
def test_lora_on_a_quantized_base(kind: str, tmp_path: Path) -> None:
    ranks = run_script("quantized", SCRIPT, [kind, tmp_path])
    for found in ranks:
        for stage in (0, 3):
            assert found[f"losses {stage}"] == pytest.approx(found["expected"], rel=1e-6)
        assert found["base 3"] == found["base 0"] / 2
        assert found["merged"] == pytest.approx(found["evaluated"], rel=1e-2)
    assert 1 < ranks[0]["peft"] / ranks[0]["adapter"] < 1.02
    # Masters and two moments.
    assert 1 < ranks[0]["checkpoint"] / (3 * ranks[0]["adapter"]) < 1.02
