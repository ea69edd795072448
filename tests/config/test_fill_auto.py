"""`Config.fill_auto`: a framework fills in what the file leaves open, and nothing else."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from zeroengine.config import load
from zeroengine.config.keys import known_paths
from zeroengine.errors import ConfigError

AUTO_FILE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}
# What the integration of Transformers fills in, by the keys that it writes.
VALUES: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-7,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
    "fp16.enabled": False,
    "bf16.enabled": True,
    "zero_optimization.reduce_bucket_size": 64,
    "zero_optimization.stage3_prefetch_bucket_size": 57,
    "zero_optimization.stage3_param_persistence_threshold": 80,
}


def value_of(tree: dict[str, Any], key: str) -> Any:
    for name in key.replace("stage3_", "").split("."):
        tree = tree[name]
    return tree


def test_every_key_that_transformers_fills_in_is_filled_in() -> None:
    config = load(AUTO_FILE)
    filled = config.fill_auto(VALUES).resolve(world_size=2)
    assert {key: value_of(filled.to_dict(), key) for key in VALUES} == VALUES
    # What was loaded stays as it was.
    assert config.gradient_clipping == 0.0 and config.train_batch_size is None


def test_the_keys_of_the_installed_transformers_are_known() -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    source = inspect.getsource(integration.HfTrainerDeepSpeedConfig)
    written = set(re.findall(r'fill_(?:match|only)\(\s*"([\w.]+)"', source))
    assert len(written) > 10 and written <= {*known_paths()}
    assert written <= VALUES.keys()


def test_values_come_in_several_steps() -> None:
    config = load(AUTO_FILE).fill_auto({"optimizer.params.lr": 1e-3, "bf16.enabled": True})
    config = config.fill_auto({"scheduler.params.total_num_steps": 50})
    assert config.optimizer is not None and config.scheduler is not None
    assert (config.optimizer.params["lr"], config.scheduler.params["total_num_steps"]) == (1e-3, 50)
    assert config.bf16.enabled is True


def test_a_number_that_nobody_filled_in_is_asked_for_when_the_batch_sizes_are() -> None:
    config = load(AUTO_FILE)
    with pytest.raises(ConfigError, match=r"total_num_steps: found \"auto\".*write the number of steps.*fill_auto"):
        config.resolve(world_size=1)


def test_all_values_that_differ_are_listed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        """{
  "train_micro_batch_size_per_gpu": 8,
  "gradient_accumulation_steps": "auto",
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
  "zero_optimization": {"stage": 2},
  "bf16": {"enabled": false}
}"""
    )
    given = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer.params.lr": 5e-5,
        "optimizer.params.betas": (0.9, 0.95),
        "bf16.enabled": True,
        "zero_optimization.stage": 3,
    }
    with pytest.raises(ConfigError) as caught:
        load(path).fill_auto(given, framework="TrainingArguments")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}: 4 problems"
    assert sorted(lines[1:]) == [
        '  bf16.enabled (line 6): found false, and TrainingArguments has true; write "auto" or true, or give '
        "TrainingArguments false.",
        '  optimizer.params.lr (line 4): found 0.001, and TrainingArguments has 5e-05; write "auto" or 5e-05, or give '
        "TrainingArguments 0.001.",
        '  train_micro_batch_size_per_gpu (line 2): found 8, and TrainingArguments has 4; write "auto" or 4, or give '
        "TrainingArguments 8.",
        '  zero_optimization.stage (line 5): found 2, and TrainingArguments has 3; write "auto" or 3, or give '
        "TrainingArguments 2.",
    ]


def test_without_must_match_the_file_wins() -> None:
    config = load({"zero_optimization": {"reduce_bucket_size": 10, "prefetch_bucket_size": "auto"}})
    given = {"zero_optimization.reduce_bucket_size": 64, "zero_optimization.stage3_prefetch_bucket_size": 57}
    zero = config.fill_auto(given, must_match=False).zero_optimization
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size) == (10, 57)


def test_absent_keys_whose_default_auto_stands_for_are_filled_in() -> None:
    config = load({"optimizer": {"type": "SGD"}})
    filled = config.fill_auto({"optimizer.params.lr": 0.5, "gradient_clipping": 2.0, "train_batch_size": 8})
    assert filled.optimizer is not None and filled.optimizer.params["lr"] == 0.5
    assert (filled.gradient_clipping, filled.train_batch_size) == (2.0, 8)


def test_a_precision_is_filled_in_where_the_file_names_none() -> None:
    assert load({}).fill_auto({"bf16.enabled": True}).bf16.enabled is True
    assert load({"fp16": {"initial_scale_power": 8}}).fill_auto({"fp16.enabled": True}).fp16.enabled is True
    for named in ({"fp16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}):
        with pytest.raises(ConfigError, match=r"bf16\.enabled: absent, which means false, and the framework has true"):
            load(named).fill_auto({"bf16.enabled": True})


def test_what_model_copy_changed_is_kept_and_counts_as_written() -> None:
    loaded = load({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "bf16": {"enabled": "auto"}})
    changes = {
        "bf16": loaded.bf16.model_copy(update={"enabled": True}),
        "zero_optimization": loaded.zero_optimization.model_copy(update={"stage": 3}),
        "gradient_accumulation_steps": "manual",
    }
    changed = loaded.model_copy(update=changes)
    filled = changed.fill_auto({"optimizer.params.lr": 0.5, "zero_optimization.reduce_bucket_size": 64})
    for name in ("bf16", "gradient_accumulation_steps"):
        assert getattr(filled, name) == changes[name]
    assert (filled.zero_optimization.stage, filled.zero_optimization.reduce_bucket_size) == (3, 64)
    assert filled.optimizer is not None and filled.optimizer.params["lr"] == 0.5
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage \(from model_copy\): found 3"):
        changed.fill_auto({"zero_optimization.stage": 2})
    without = loaded.model_copy(update={"optimizer": None}).fill_auto({"optimizer.params.lr": 0.5})
    assert without.optimizer is None
    assert loaded.bf16.enabled is None


def test_keys_of_an_optimizer_or_schedule_that_the_file_does_not_name_are_left_out() -> None:
    given = {"optimizer.params.betas": [0.9, 0.95], "scheduler.params.warmup_max_lr": 0.1, "optimizer.params.lr": 0.5}
    assert load({}).fill_auto(given).to_dict() == load({}).to_dict()
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 5}}
    filled = load({"optimizer": {"type": "SGD"}, "scheduler": cosine}).fill_auto(given)
    assert filled.optimizer is not None and "betas" not in filled.optimizer.params
    assert filled.scheduler is not None and "warmup_max_lr" not in filled.scheduler.params


def test_a_parameter_of_an_imported_optimizer_is_filled_in_where_it_is_auto() -> None:
    config = load(
        {"optimizer": {"type": "torch.optim.RAdam", "params": {"lr": "auto", "decoupled_weight_decay": True}}}
    )
    given = {"optimizer.params.lr": 0.5, "optimizer.params.eps": 1e-7, "optimizer.params.decoupled_weight_decay": True}
    filled = config.fill_auto(given)
    assert filled.optimizer is not None
    assert filled.optimizer.params == {"lr": 0.5, "decoupled_weight_decay": True}


def test_none_says_nothing() -> None:
    config = load({"gradient_clipping": 1.0})
    assert config.fill_auto({"gradient_clipping": None, "optimizer": None}).to_dict() == config.to_dict()


def test_what_other_keys_of_deepspeed_ask_for_is_told() -> None:
    key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    assert load(AUTO_FILE).fill_auto({key: False}).notices == load(AUTO_FILE).notices
    assert any(
        f"{key} (from Trainer) has no effect" in text
        for text in load({}).fill_auto({key: True}, framework="Trainer").notices
    )
    with pytest.raises(ConfigError, match=r"checkpoint.use_node_local_storage \(from Trainer\): .* refused"):
        load({}).fill_auto({"checkpoint.use_node_local_storage": True}, framework="Trainer")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer.params.learning_rate": 0.1}, r"unknown key. Did you mean optimizer.params.lr\?"),
        ({"zero_optimization.stge": 1}, r"unknown key. Did you mean zero_optimization.stage\?"),
        ({"max_grad_norm": 1.0}, r"unknown key. Did you mean gradient_clipping\?"),
        ({"nonsense.deep.key": 1.0}, "nonsense.deep.key: unknown key"),
        ({"gradient_clipping": "1.0"}, r"gradient_clipping \(from the framework\): found \"1.0\" .*a valid number"),
        ({"train_batch_size": 2.5}, "a valid integer"),
        ([("train_batch_size", 2)], "fill_auto takes values by dotted key"),
    ],
)
def test_a_wrong_key_or_value_is_refused(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(AUTO_FILE).fill_auto(values)


def test_a_filled_configuration_is_like_a_file_with_these_values() -> None:
    written = json.loads(json.dumps(AUTO_FILE))
    written["optimizer"]["params"] = {"lr": 5e-5, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1}
    given = {key: value for key, value in VALUES.items() if key.startswith("optimizer")}
    config = load(AUTO_FILE).fill_auto(given)
    assert config.to_dict() == load(written).to_dict() and config.notices == load(written).notices
