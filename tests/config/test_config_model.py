"""`Config`: defaults, `"auto"`, and resolution."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest
import torch

from zeroengine.config import Config, load
from zeroengine.config.fields import Section
from zeroengine.config.keys import checked_models
from zeroengine.config.reference import field_docstrings
from zeroengine.errors import ConfigError

BUCKETS = ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters")


def test_an_empty_configuration_is_stage_0_in_fp32() -> None:
    config = load({}).resolve(world_size=2)
    assert config.zero_optimization.stage == 0
    assert (config.low_precision, config.autocast_dtype, config.scales_loss) == (None, None, False)
    assert (config.gradient_clipping, config.optimizer, config.scheduler, config.units) == (0.0, None, None, None)
    assert config.zero_optimization.overlap_comm is True
    assert config.comm.timeout_seconds == 600 and config.comm.transport == "auto"
    assert config.notices == ()


@pytest.mark.parametrize("value", ["auto", None])
def test_auto_and_null_stand_for_the_default(value: str | None) -> None:
    plain = load({})
    buckets = dict.fromkeys(BUCKETS, value)
    config = load({"zero_optimization": buckets, "gradient_clipping": value, "steps_per_print": value})
    assert config.to_dict() == plain.to_dict()
    assert config.zero_optimization.reduce_bucket_size is None


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("written", "model_dtype", "expected"),
    [
        ({"bf16": True}, FP32, BF16),
        ({"bf16": False}, BF16, None),
        ({"bf16": "auto"}, BF16, BF16),
        ({"bf16": "auto"}, FP32, None),
        ({"bf16": "auto"}, None, None),
        ({"fp16": True}, BF16, FP16),
        ({"fp16": "auto"}, FP16, FP16),
        ({"fp16": "auto", "bf16": "auto"}, FP16, FP16),
        ({"fp16": "auto", "bf16": "auto"}, BF16, BF16),
        ({"fp16": "auto", "bf16": True}, FP16, BF16),
        ({"bf16": "auto", "fp16": True}, BF16, FP16),
        ({"bf16": "auto", "torch_autocast": True}, BF16, None),
    ],
)
def test_an_auto_precision_follows_the_model_unless_another_one_is_on(
    written: dict[str, object], model_dtype: torch.dtype | None, expected: torch.dtype | None
) -> None:
    tree = {section: {"enabled": enabled} for section, enabled in written.items()}
    config = load(tree).resolve(world_size=1, model_dtype=model_dtype)
    assert config.low_precision is expected
    assert isinstance(config.bf16.enabled, bool) and isinstance(config.fp16.enabled, bool)


@pytest.mark.parametrize("on", [("bf16", "fp16"), ("bf16", "torch_autocast"), ("fp16", "torch_autocast")])
def test_one_precision_at_a_time(on: tuple[str, ...]) -> None:
    with pytest.raises(
        ConfigError, match=f'{on[0]} and {on[1]} are enabled, .*; write "{on[1]}": {{"enabled": false}}'
    ):
        load({section: {"enabled": True} for section in on})
    load({on[0]: {"enabled": True}, on[1]: {"enabled": False}})


def test_the_loss_is_scaled_where_gradients_may_be_fp16() -> None:
    for tree, scales in [
        ({"fp16": {"enabled": True}}, True),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, True),
        ({"torch_autocast": {"enabled": True}}, False),
        ({"bf16": {"enabled": True}}, False),
        ({"fp16": {"loss_scale": 128}}, False),
    ]:
        assert load(tree).resolve(world_size=1).scales_loss is scales, tree


def test_an_fp16_model_without_fp16_is_told_that_its_loss_is_not_scaled() -> None:
    config = load({}).resolve(world_size=1, model_dtype=FP16)
    assert any("the loss is not scaled" in notice for notice in config.notices)
    assert config.resolve(world_size=1, model_dtype=FP16).notices == config.notices
    for enabled in ({"fp16": {"enabled": "auto"}}, {"bf16": {"enabled": True}}):
        assert not any("not scaled" in n for n in load(enabled).resolve(world_size=1, model_dtype=FP16).notices)


@pytest.mark.parametrize(
    ("given", "accumulation", "kept", "sent"),
    [
        (None, 1, BF16, None),
        (None, 4, FP32, None),
        ("fp32", 1, FP32, None),
        ("bf16", 4, BF16, None),
    ],
)
def test_gradients_accumulate_in_fp32_unless_told_otherwise(
    given: str | None, accumulation: int, kept: torch.dtype, sent: torch.dtype | None
) -> None:
    tree = {"data_types": {"grad_accum_dtype": given}, "gradient_accumulation_steps": accumulation}
    config = load(tree).resolve(world_size=2)
    assert config.accumulation_dtype(BF16) is kept
    assert config.reduce_dtype(BF16) is sent
    assert config.accumulation_dtype(torch.float64) is torch.float64, "wider ones are left alone"
    reduced = load({**tree, "communication_data_type": "fp32"}).resolve(world_size=2)
    assert reduced.reduce_dtype(BF16) is FP32 and reduced.reduce_dtype(torch.float64) is None


def test_modules_that_keep_fp32_are_none_of_autocast_s_business() -> None:
    tree = {"keep_fp32_modules": ["LayerNorm"]}
    assert load(tree | {"bf16": {"enabled": True}}).notices == ()
    (notice,) = load(tree | {"torch_autocast": {"enabled": True}}).notices
    assert "keep_fp32_modules has no effect under torch_autocast" in notice


def test_weights_that_stay_in_files_are_those_of_parameters_on_a_disk() -> None:
    for device, num_notices in (("cpu", 1), ("nvme", 0)):
        place = {"device": device, "nvme_path": "/local_nvme", "in_place": True}
        notices = load({"zero_optimization": {"stage": 3, "offload_param": place}}).notices
        assert len([text for text in notices if "in_place has no effect" in text]) == num_notices


@pytest.mark.parametrize("spelling", ["bf16", "bfloat16", "torch.bfloat16"])
def test_a_dtype_may_be_spelt_as_torch_does(spelling: str) -> None:
    tree = {"communication_data_type": spelling, "torch_autocast": {"enabled": True, "dtype": spelling}}
    config = load(tree)
    assert config.communication_data_type == "bf16" and config.autocast_dtype is BF16
    with pytest.raises(ConfigError, match=r'torch_autocast.dtype: found "float32" .*; it should be "bf16" or "fp16"'):
        load({"torch_autocast": {"dtype": "float32"}})


def test_gradients_are_divided_before_the_sum_as_in_deepspeed() -> None:
    assert load({}).predivide(8) == 1
    assert load({"prescale_gradients": True, "gradient_predivide_factor": 4}).predivide(8) == 8
    assert load({"gradient_predivide_factor": 4}).predivide(8) == 4


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
    config = load({"graph_harvesting": True})
    assert config.notices and config.resolve(world_size=2).notices == config.notices


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"bf16": {"enabled": "auto"}},
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_max_lr": "auto"}}},
        {"units": ["a", "b.*"], "train_batch_size": 6},
        {"optimizer": {"type": "torch.optim.RAdam", "params": {"betas": (0.9, 0.99), "lr": "auto"}}},
        {"optimizer": {"type": "Lion"}, "fp16": {"enabled": "auto"}, "keep_fp32_modules": ["LayerNorm"]},
        {"optimizer": {"type": "Lion8bit"}},
    ],
)
def test_what_to_dict_gives_load_takes_back(tree: dict[str, object]) -> None:
    config = load(tree)
    again = load(json.loads(json.dumps(config.to_dict())))
    assert again.to_dict() == config.to_dict()
    assert again.state_dtype is config.state_dtype


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
            assert field_docstrings(model).get(name), f"{model.__name__}.{name}"
            for inner in checked_models(info):
                walk(inner)

    walk(Config)


@pytest.mark.parametrize(
    ("steps", "more", "expected"),
    [
        (8, {"data_types": {"grad_accum_dtype": "bf16"}}, "1/256 of the sum, 8 of them up to 2.7%"),
        (512, {"data_types": {"grad_accum_dtype": "fp16"}}, "1/2048 of the sum, 512 of them up to 25.0%"),
        ("manual", {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "1/256 of the sum. Write"),
        (8, {"bf16": {"enabled": True}}, None),
        (1, {"data_types": {"grad_accum_dtype": "bf16"}}, None),
    ],
)
def test_sums_in_16_bits_say_what_they_lose(steps: Any, more: dict[str, Any], expected: str | None) -> None:
    config = load({"gradient_accumulation_steps": steps, "bf16": {"enabled": True}, **more})
    found = [notice for notice in config.resolve(world_size=2).resolve(world_size=2).notices if "add up in" in notice]
    assert len(found) == (expected is not None) and all(expected in notice for notice in found if expected)


def test_sizes_that_auto_becomes_are_listed() -> None:
    sizes = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "units": ["a"]}
    sizes |= {"bf16": {"enabled": "auto"}}
    resolved = load(sizes).resolve(world_size=2)
    expected = '"auto" stands for train_micro_batch_size_per_gpu = 1, train_batch_size = 2, bf16.enabled = false.'
    assert resolved.notices == resolved.resolve(world_size=2).notices == (expected,)
