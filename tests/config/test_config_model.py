"""`Config`: defaults, `"auto"`, resolution, and what ranks compare."""

from __future__ import annotations

import json

import pydantic
import pytest
import torch

from zeroengine.config import Config, load
from zeroengine.config.fields import Section
from zeroengine.config.keys import checked_models

BUCKETS = ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters")


def test_an_empty_configuration_is_stage_0_in_fp32() -> None:
    config = load({}).resolve(world_size=2)
    assert config.zero_optimization.stage == 0
    assert config.compute_dtype is torch.float32
    assert (config.gradient_clipping, config.optimizer, config.scheduler, config.units) == (0.0, None, None, None)
    assert config.zero_optimization.overlap_comm is True
    assert config.comm.timeout_seconds == 600 and config.comm.transport == "auto"
    assert config.notices == ()


@pytest.mark.parametrize("value", ["auto", None])
def test_auto_and_null_stand_for_the_default(value: str | None) -> None:
    plain = load({})
    buckets = dict.fromkeys(BUCKETS, value)
    config = load({"zero_optimization": buckets, "gradient_clipping": value, "steps_per_print": value})
    assert config.fingerprint() == plain.fingerprint()
    assert config.zero_optimization.reduce_bucket_size is None


@pytest.mark.parametrize(
    ("written", "model_dtype", "expected"),
    [
        (True, torch.float32, torch.bfloat16),
        (False, torch.bfloat16, torch.float32),
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", torch.float32, torch.float32),
        ("auto", None, torch.float32),
    ],
)
def test_bf16_auto_follows_the_model(written: object, model_dtype: torch.dtype | None, expected: torch.dtype) -> None:
    config = load({"bf16": {"enabled": written}}).resolve(world_size=1, model_dtype=model_dtype)
    assert config.compute_dtype is expected
    assert isinstance(config.bf16.enabled, bool)


def test_integers_may_be_written_as_people_write_them() -> None:
    config = load({"zero_optimization": {"reduce_bucket_size": 5e8}, "steps_per_print": float("inf")})
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert isinstance(config.zero_optimization.reduce_bucket_size, int)
    assert config.steps_per_print is None


def test_a_configuration_is_frozen() -> None:
    config = load({})
    with pytest.raises(pydantic.ValidationError):
        config.gradient_clipping = 1.0  # type: ignore[misc]
    with pytest.raises(pydantic.ValidationError):
        config.zero_optimization.stage = 1  # type: ignore[misc]


def test_resolving_keeps_the_notices() -> None:
    config = load({"wall_clock_breakdown": True})
    assert config.notices and config.resolve(world_size=2).notices == config.notices


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"bf16": {"enabled": "auto"}},
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_max_lr": "auto"}}},
        {"units": ["a", "b.*"], "train_batch_size": 6},
    ],
)
def test_what_to_dict_gives_load_takes_back(tree: dict[str, object]) -> None:
    config = load(tree)
    again = load(json.loads(json.dumps(config.to_dict())))
    assert again.to_dict() == config.to_dict()
    assert again.fingerprint() == config.fingerprint()
    assert again.diff(config.to_dict()) == []


def test_ranks_that_differ_learn_where() -> None:
    mine = load({"zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD"}, "gradient_clipping": 1})
    theirs = load({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0})
    assert mine.fingerprint() != theirs.fingerprint()
    paths = mine.diff(theirs.to_dict())
    assert "zero_optimization.stage" in paths and "optimizer.type" in paths
    assert "gradient_clipping" not in paths


def test_the_description_has_every_value() -> None:
    config = load({"optimizer": {"type": "SGD"}, "train_batch_size": 8}).resolve(world_size=4)
    lines = dict(line.split(maxsplit=1) for line in config.describe().splitlines()[1:])
    assert lines["train_micro_batch_size_per_gpu"] == "2"
    assert lines["optimizer.type"] == '"SGD"'
    assert lines["zero_optimization.stage"] == "0"


def test_every_field_has_a_docstring() -> None:
    def walk(model: type[pydantic.BaseModel]) -> None:
        assert issubclass(model, Section)
        for name, info in model.model_fields.items():
            assert info.description, f"{model.__name__}.{name}"
            for inner in checked_models(info):
                walk(inner)

    walk(Config)
