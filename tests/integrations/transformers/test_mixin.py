from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.environments import run_script

HERE = Path(__file__).parent
TOLERANCE = 1e-6


def check_equal(run: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    for key, values in run.items():
        # Norms are computed in fp32 by DDP.
        assert values == pytest.approx(expected[key], rel=1e-6, abs=TOLERANCE), (where, key)


def check_like_ddp(runs: dict[str, Any], suffix: str = "") -> None:
    expected = runs[f"ddp{suffix}"]
    assert len(set(expected["loss"])) > 1
    stages = [name for name in runs if not name.startswith("ddp") and name.endswith(suffix)]
    assert stages
    for name in stages:
        check_equal(runs[name], expected, name)


@pytest.mark.slow
def test_sft_and_dpo_equal_ddp(tmp_path: Path) -> None:
    for found in run_script("transformers", HERE / "with_trl.py", [tmp_path, "sft", "dpo"]):
        check_like_ddp(found["sft"])
        adapters = {name: run for name, run in found["dpo"].items() if name.endswith(", adapter")}
        check_like_ddp(adapters, ", adapter")
        check_like_ddp({name: run for name, run in found["dpo"].items() if name not in adapters})


@pytest.mark.slow
def test_grpo_and_rloo_equal_ddp_and_adapters_are_saved_alone(tmp_path: Path) -> None:
    for found in run_script("transformers", HERE / "with_trl.py", [tmp_path, "grpo", "rloo", "adapter"]):
        check_like_ddp(found["adapter"])
        for trainer in ("grpo", "rloo"):
            adapters = {name: run for name, run in found[trainer].items() if name.endswith(", adapter")}
            check_like_ddp(adapters, ", adapter")
            check_like_ddp({name: run for name, run in found[trainer].items() if name not in adapters})


@pytest.mark.slow
def test_vllm_gets_the_weights_that_it_gets_under_ddp(tmp_path: Path) -> None:
    for found in run_script("transformers", HERE / "with_trl.py", [tmp_path, "vllm"]):
        for mode in ("server", "colocate"):
            for model in ("", " with an adapter"):
                suffix = f", {mode}{model}"
                check_like_ddp({name: run for name, run in found["vllm"].items() if name.endswith(suffix)}, suffix)


@pytest.mark.slow
def test_seq2seq_generates_at_stage_3_while_another_rank_has_stopped() -> None:
    for found in run_script("transformers", HERE / "generation.py"):
        ddp, stage3 = found["ddp"], found["stage 3"]
        assert stage3["tokens"] == ddp["tokens"] and stage3["loss"] == pytest.approx(ddp["loss"], abs=TOLERANCE)
        lengths = {sum(token != 0 for token in tokens) for tokens in ddp["tokens"]}
        assert len(lengths) == 2, "one rank stopped earlier"
