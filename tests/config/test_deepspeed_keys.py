"""DeepSpeed's keys: each has a fate, and files that people have load or say why not."""

from __future__ import annotations

import os
import pydoc
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroengine.config import deepspeed_keys, load
from zeroengine.config.keys import honored_paths, known_paths
from zeroengine.errors import ConfigError

FILES = Path(__file__).parent / "deepspeed_files"
STORED = (Path(__file__).parent / "deepspeed_keys.txt").read_text().split()


def is_classified(path: str) -> bool:
    """Whether a key is honored, or it or its block has a row."""
    parts = path.split(".")
    above = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return path in known_paths() or any(step in deepspeed_keys.TABLE for step in above)


def test_every_key_of_deepspeed_has_a_fate() -> None:
    assert len(STORED) > 300
    assert [path for path in STORED if not is_classified(path)] == []


def test_the_stored_keys_are_those_of_the_installed_deepspeed() -> None:
    """To renew the list: python tests/config/test_deepspeed_keys.py."""
    pytest.importorskip("deepspeed")
    missing = read_by_deepspeed() - set(STORED)
    assert not missing, f"DeepSpeed reads keys that are not in the stored list: {sorted(missing)}"


def test_no_key_is_both_honored_and_not() -> None:
    honored = {*honored_paths(), *deepspeed_keys.ALIASES}
    assert not honored & deepspeed_keys.TABLE.keys()
    assert set(deepspeed_keys.ALIASES.values()) <= honored


def test_the_templates_of_accelerate_load() -> None:
    """They say of AdamW that it is AdamW, and leave the numbers to the training script."""
    params = {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True}
    tree = {
        "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": 100}},
        "zero_optimization": {"stage": 1, "allgather_bucket_size": "auto", "reduce_bucket_size": "auto"},
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    config = load(tree)
    assert config.optimizer is not None and "adam_w_mode" not in config.optimizer.params
    assert load(config.to_dict()).to_dict() == config.to_dict()
    params["adam_w_mode"] = False
    with pytest.raises(ConfigError, match=r'adam_w_mode is false, but the type AdamW .*, or write "type": "Adam"'):
        load(tree)


def test_a_comment_is_ignored_with_a_notice() -> None:
    tree = {"_comment": "x", "zero_optimization": {"_comment_stage": "y", "//": 3, "stage": 2}}
    config = load(tree)
    assert config.zero_optimization.stage == 2
    assert [notice.split(" ")[0] for notice in config.notices] == [
        "_comment",
        "zero_optimization._comment_stage",
        "zero_optimization.//",
    ]


def test_deepspeeds_own_clipping_is_pointed_out_where_every_key_is_shared() -> None:
    shared = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    assert any("DeepSpeed 0.19.8 clips at 1.0" in notice for notice in load(shared).notices)
    assert load(shared | {"gradient_clipping": 0.5}).notices == ()
    assert load(shared | {"units": ["blocks.*"]}).notices == (), "a file for zeroengine"


def notices(name: str) -> str:
    return "\n".join(load(FILES / name).notices)


def test_the_zero3_file_of_transformers_with_auto_everywhere() -> None:
    told = notices("hf_zero3_auto.json")
    for key in ("contiguous_gradients", "sub_group_size", "stage3_max_reuse_distance"):
        assert f"zero_optimization.{key} (line" in told
    assert '"auto" stands for the default' in told
    assert "wall_clock_breakdown" not in told and "offload" not in told and "fp16" not in told
    config = load(FILES / "hf_zero3_auto.json").resolve(world_size=8)
    assert (config.zero_optimization.stage, config.train_batch_size) == (3, 8)
    assert config.zero_optimization.max_live_parameters == 10**9


def test_the_zero2_file_of_transformers_with_offload_lacks_the_number_of_steps_alone() -> None:
    config = load(FILES / "hf_zero2_offload.json")
    with pytest.raises(ConfigError) as caught:
        config.resolve(world_size=1)
    assert str(caught.value).startswith(
        f"{FILES / 'hf_zero2_offload.json'}: scheduler.params.total_num_steps (line 21)"
    )
    filled = config.fill_auto({"scheduler.params.total_num_steps": 1000}).resolve(world_size=1)
    assert filled.zero_optimization.offload_optimizer.device == "cpu"


def test_the_file_that_accelerate_writes() -> None:
    config = load(FILES / "accelerate_zero3.json")
    assert config.notices == (
        "zero_allow_untested_optimizer (line 14) has no effect: every optimizer that looks at one parameter at a time "
        "is allowed.",
    )
    assert config.steps_per_print is None
    assert config.resolve(world_size=8).bf16.enabled
    with pytest.raises(ConfigError, match="Change train_batch_size to 32"):
        config.resolve(world_size=4)


def test_a_pretraining_file() -> None:
    told = notices("pretraining_zero1.json")
    assert len(load(FILES / "pretraining_zero1.json").notices) == 2
    for key in (
        "allgather_bucket_size",
        "round_robin_gradients",
    ):
        assert key in told
    config = load(FILES / "pretraining_zero1.json").resolve(world_size=16)
    assert config.wall_clock_breakdown and not config.flops_profiler.enabled
    assert config.gradient_accumulation_steps == 8
    assert config.optimizer is not None and config.optimizer.type == "AdamW"


def test_the_tutorial_file_in_fp16() -> None:
    config = load(FILES / "tutorial_fp16.json").resolve(world_size=2)
    assert config.low_precision is torch.float16 and config.scales_loss
    assert (config.fp16.loss_scale, config.fp16.initial_scale_power, config.fp16.loss_scale_window) == (0, 15, 500)
    assert "fp16" not in notices("tutorial_fp16.json")


def test_the_file_of_zero_plus_plus() -> None:
    config = load(FILES / "zeropp_quantized.json").resolve(world_size=16, ranks_per_node=8)
    zero = config.zero_optimization
    assert zero.quantizes_gathers(trainable=True) and zero.gradient_bits == 8
    assert zero.degree_numbers is not None and zero.degree_numbers["secondary"] == 8


def test_what_changes_numbers_is_refused_key_by_key() -> None:
    with pytest.raises(ConfigError) as refused:
        load({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}, "amp": {"enabled": True}})
    assert "2 problems" in str(refused.value)
    assert "ZenFlow changes results" in str(refused.value)


# The models of DeepSpeed's monitor and profiles, by the section of the configuration.
MONITOR_MODELS = {
    "tensorboard": "deepspeed.monitor.config.TensorBoardConfig",
    "csv_monitor": "deepspeed.monitor.config.CSVConfig",
    "wandb": "deepspeed.monitor.config.WandbConfig",
    "comet": "deepspeed.monitor.config.CometConfig",
    "comms_logger": "deepspeed.comm.config.CommsLoggerConfig",
}


@pytest.mark.parametrize("section", MONITOR_MODELS)
def test_the_defaults_of_loggers_are_those_of_the_installed_deepspeed(section: str) -> None:
    pytest.importorskip("deepspeed")
    theirs = {name: value or None for name, value in pydoc.locate(MONITOR_MODELS[section])().model_dump().items()}  # type: ignore[operator]
    ours = {name: getattr(getattr(load({}), section), name, None) or None for name in theirs}
    different = {name for name in theirs if ours[name] != theirs[name]}
    assert different <= {"job_name", "prof_all"}


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def awake(path: str, value: Any) -> dict[str, Any]:
    """The tree with this one key, and whatever must stand around it."""
    tree = nested(path, value)
    section = path.partition(".")[0]
    if section in ("bf16", "fp16", "torch_autocast"):
        tree[section]["enabled"] = True
    if section == "optimizer":
        tree[section]["type"] = "AdamW"
    if section == "scheduler":
        tree[section]["type"] = "WarmupLR"
    return tree


ON = {
    "optimizer.params.bias_correction": False,
    "optimizer.params.fp32_optimizer_states": False,
    "zero_optimization.compute_grad_norm": False,
    "data_types.keep_in_fp32_modules": ["norm"],
}


@pytest.mark.parametrize("path", deepspeed_keys.TABLE)
def test_every_row_speaks_where_its_key_asks_for_something(path: str) -> None:
    row = deepspeed_keys.TABLE[path]
    refuses = row.status == "refused"
    tree = awake(path, ON.get(path, 77))
    try:
        told = "\n".join(load(tree).notices)
        assert not refuses
    except ConfigError as error:
        assert refuses
        told = str(error)
    assert path in told and row.reason in told


@pytest.mark.parametrize("path", deepspeed_keys.TABLE)
def test_every_row_is_silent_where_its_key_asks_for_nothing(path: str) -> None:
    row = deepspeed_keys.TABLE[path]
    for value in (*row.off, "auto", {}, *([{row.switch: False, "x": 1}] if row.switch else [])):
        tree = awake(path, value)
        assert not any(path in notice for notice in load(tree).notices)


def test_a_precision_that_is_off_is_not_judged() -> None:
    assert load({"bf16": {"enabled": False, "bf16_optimizer_states": True}}).notices == ()
    with pytest.raises(ConfigError, match=r'bf16_optimizer_states: .* refused; write "optimizer_state_dtype": "bf16"'):
        load({"bf16": {"enabled": True, "bf16_optimizer_states": True}})


@pytest.mark.parametrize("name", ["check_grad_overflow", "check_overflow"])
def test_the_overflow_check_of_a_bf16_section_counts_where_bf16_is_on(name: str) -> None:
    assert load({"bf16": {"enabled": True, name: False}}).check_grad_overflow is False
    assert load({"bf16": {"enabled": False, name: False}}).check_grad_overflow is True
    assert load({"check_grad_overflow": False}).check_grad_overflow is False


def test_an_imported_optimizer_is_not_judged_by_the_parameters_of_others() -> None:
    tree = {"type": "torch.optim.AdamW", "params": {"amsgrad": True, "maximize": True, "lr": 0.1, "eps": "auto"}}
    config = load({"optimizer": tree, "gradient_clipping": 1})
    assert config.notices == () and config.optimizer is not None
    assert config.optimizer.params == {"amsgrad": True, "maximize": True, "lr": 0.1}
    with pytest.raises(ConfigError, match="AMSGrad is not available"):
        load({"optimizer": {**tree, "type": "AdamW"}})


def test_the_old_boolean_zero_optimization_is_stage_1() -> None:
    assert load({"zero_optimization": True}).zero_optimization.stage == 1
    assert load({"zero_optimization": False}).zero_optimization.stage == 0


def test_a_deepspeed_file_without_clipping_is_told_of_the_other_default() -> None:
    assert any("DeepSpeed 0.19.8 clips at 1.0" in notice for notice in load({"graph_harvesting": True}).notices)


# How the list of keys is made: DeepSpeed's pydantic models, and what its parser asks of a dict.


def read_by_deepspeed() -> set[str]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime import config as runtime
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    keys: set[str] = set()

    class Spy(dict[str, Any]):
        """A dict that notes every key that is asked of it."""

        path = ""

        def get(self, key: str, default: Any = None) -> Any:
            keys.add(self.path + key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            keys.add(f"{self.path}{key}")
            return super().__contains__(key)

        def __getitem__(self, key: str) -> Any:
            keys.add(self.path + key)
            return super().__getitem__(key)

        def keys(self) -> Any:
            return self

        def __copy__(self) -> Spy:
            return self

    def spy(path: str, **values: Any) -> Spy:
        made = Spy(values)
        made.path = f"{path}." if path else ""
        return made

    blocks = ("aio activation_checkpointing flops_profiler torch_autocast timers pipeline data_efficiency autotuning "
              "data_types expert_parallel").split()  # fmt: skip
    checkpoint = {name: spy(f"checkpoint.{name}") for name in ("writer", "parallel_write")}
    tree = {name: spy(name) for name in blocks}
    tree["checkpoint"] = spy("checkpoint", **checkpoint)
    tree["optimizer"] = spy("optimizer", type="Adam", params=spy("optimizer.params"))
    tree["scheduler"] = spy("scheduler", type="WarmupLR", params={})
    runtime.DeepSpeedConfig(spy("", train_batch_size=1, **tree))

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "tensor_parallel": TPTrainingConfig,
        "hybrid_engine": runtime.HybridEngineConfig,
        "weight_quantization": runtime.WeightQuantConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        "": DeepSpeedMonitorConfig,
    }
    for path, model in models.items():
        keys |= set(_fields(model, f"{path}." if path else ""))
    removed = {*runtime._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    removed |= {f"zero_optimization.{key}" for key in runtime._REMOVED_ZERO_CONFIG_KEYS}
    return keys | removed | {"sequence_parallel_size", "optimizer.params.torch_adam", "optimizer.params.adam_w_mode"}


def _fields(model: Any, prefix: str) -> list[str]:
    found = []
    for name, info in model.model_fields.items():
        spellings = {name, info.alias or name}
        found += [prefix + spelling for spelling in spellings]
        for inner in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if hasattr(inner, "model_fields"):
                found += [key for spelling in spellings for key in _fields(inner, f"{prefix}{spelling}.")]
    return found


if __name__ == "__main__":
    print("\n".join(sorted(read_by_deepspeed())))
