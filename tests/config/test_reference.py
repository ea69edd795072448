"""The JSON Schema, the ready files and the tables in the docs are current."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.generated_docs import (
    COMING_FROM,
    CONFIGURATION,
    SCHEMA,
    deepspeed_tables,
    honored_table,
    integrations_table,
)
from zeroengine.config import load, reference
from zeroengine.errors import ConfigError

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
READY = sorted(path for path in CONFIGS.glob("*.json") if path.name != "schema.json")
STAGES = [CONFIGS / f"zero{stage}.json" for stage in range(4)]
DEEPSPEED_FILES = Path(__file__).parent / "deepspeed_files"


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = reference.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_stored_schema_is_current() -> None:
    assert json.loads(SCHEMA.read_text()) == reference.json_schema(), "run: python -m tests.generated_docs"


def test_the_tables_in_the_docs_are_current() -> None:
    text = CONFIGURATION.read_text()
    for table in (honored_table(), *deepspeed_tables()):
        assert table in text, "run: python -m tests.generated_docs"
    assert integrations_table() in COMING_FROM.read_text(), "run: python -m tests.generated_docs"


def test_there_is_a_ready_file_for_each_stage_and_subject() -> None:
    subjects = ["ema", "experts", "inference-nvme", "long-sequences", "low-memory", "muon", "snapshots"]
    subjects += ["tensor-parallel"]
    assert READY == [*(CONFIGS / f"{name}.json" for name in subjects), *STAGES]


@pytest.mark.parametrize("path", READY, ids=lambda path: path.name)
def test_a_ready_file_loads_without_a_notice(path: Path, validator: Any) -> None:
    tree = json.loads(path.read_text())
    validator.validate(tree)
    assert tree["$schema"] == "./schema.json"
    config = load(path).resolve(world_size=2)
    assert config.notices == ()
    assert path not in STAGES or config.zero_optimization.stage == STAGES.index(path)


def test_the_ready_files_of_the_stages_differ_in_the_stage_alone() -> None:
    trees = [json.loads(path.read_text()) for path in STAGES]
    for stage, tree in enumerate(trees):
        assert tree["zero_optimization"].pop("stage") == stage
    assert all(tree == trees[0] for tree in trees)


@pytest.mark.parametrize("path", sorted(DEEPSPEED_FILES.glob("*.json")), ids=lambda path: path.stem)
def test_editor_and_loader_agree_on_deepspeeds_files(path: Path, validator: Any) -> None:
    tree = json.loads(path.read_text())
    if tree.get("steps_per_print") == float("inf"):
        del tree["steps_per_print"]  # no JSON
    try:
        load(path)
        loads = True
    except ConfigError:
        loads = False
    assert validator.is_valid(tree) == loads


@pytest.mark.parametrize(
    "tree",
    [
        {"optimizer": {"type": "torch.optim.RAdam", "params": {"anything": [1]}}},
        {"optimizer": {"type": "Lion", "params": {"betas": [0.9, 0.99]}}},
        {"communication_data_type": "float32", "data_types": {"grad_accum_dtype": "auto", "buffer_dtype": "bfloat16"}},
        {"torch_autocast": {"enabled": True, "dtype": "float16", "lower_precision_safe_modules": ["a"]}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 0.1], "warmup_max_lr": "auto"}}},
        {"keep_fp32_modules": "auto", "prescale_gradients": True, "check_grad_overflow": False},
        {"zero_optimization": {"offload_optimizer": None, "offload_param": {"device": None}}},
        {"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}, "memory_check": "warn"},
    ],
)
def test_an_editor_accepts_what_the_loader_takes(tree: dict[str, Any], validator: Any) -> None:
    validator.validate(tree)
    load(tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"stage": 3},
        {"zero_optimization": {"stage": 4}},
        {"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}},
        {"scheduler": {"type": "OneCycle"}},
        {"train_batch_size": "8"},
        {"bf16": {"enabled": "yes"}},
        {"optimizer": {"type": "Lamb"}},
        {"optimizer": {"type": "torch.optim.RAdam", "parms": {}}},
        {"fp16": {"enabled": True, "min_loss_scale": 0}},
        {"torch_autocast": {"enabled": True, "dtype": "float32"}},
        {"keep_fp32_modules": "LayerNorm"},
        {"zero_optimization": {"offload_optimizer": "auto"}},
        {"zero_optimization": {"stage": None}},
    ],
)
def test_an_editor_marks_what_the_loader_rejects(tree: dict[str, Any], validator: Any) -> None:
    assert not validator.is_valid(tree)
    with pytest.raises(ConfigError):
        load(tree)
