"""DeepSpeed's configuration as it is written, turned into zeroengine's."""

from __future__ import annotations

import base64
import contextlib
import copy
import enum
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroengine.config import Config, load
from zeroengine.config.deepspeed_keys import ALIASES
from zeroengine.config.source import read_file
from zeroengine.engine.mpu_slices import MODEL, ask_mpu
from zeroengine.errors import ConfigError, ZeroEngineError
from zeroengine.integrations.deepspeed.leaf_modules import DeepSpeedZeroLeafModuleConfig
from zeroengine.integrations.deepspeed.script_utils import log_dist
from zeroengine.integrations.deepspeed.ulysses_sp import UlyssesSPAttentionHF

# The value of DeepSpeed 0.19 where the file names none.
GRADIENT_CLIPPING_DEFAULT = 1.0
# What save_checkpoint does if the ranks pass different tags.
# The section "bf16" under each of its names.
BF16_SECTIONS = ("bf16", *(written for written, canonical in ALIASES.items() if canonical == "bf16"))
TAG_VALIDATIONS = ("WARN", "FAIL", "IGNORE")


# Where a state lives, the states that ``offload_states`` moves, and the stages.
OffloadDeviceEnum = enum.Enum("OffloadDeviceEnum", {"none": "none", "cpu": "cpu", "nvme": "nvme"}, type=str)
OffloadStateTypeEnum = enum.Enum(  # type: ignore[misc]
    "OffloadStateTypeEnum",
    {name: name for name in "optim_states hp_params lp_params lp_grads contiguous_grad_buffer".split()},
    type=str,
)
ZeroStageEnum = enum.IntEnum("ZeroStageEnum", "disabled optimizer_states gradients weights", start=0)


class DeepSpeedConfigError(ConfigError):
    """A configuration that cannot be honored, under DeepSpeed's name for it."""


class ZeRORuntimeException(ZeroEngineError):
    """An optimizer that the configuration rules out, under DeepSpeed's name for the error."""


def read_settings(config: Any) -> dict[str, Any]:
    """Return the keys of a configuration as a new dict.

    Args:
        config: A dict, the name of a JSON, YAML or HJSON file, or a JSON text in base64, as DeepSpeed takes it.

    Raises:
        DeepSpeedConfigError: It is something else, or cannot be read.
    """
    if isinstance(config, Config):
        return config.to_dict()
    if isinstance(config, Mapping):
        tree = _plain(config)
    elif isinstance(config, (str, Path)):
        tree = _decoded(config) or read_file(Path(config)).tree
    else:
        raise DeepSpeedConfigError(
            f"the configuration is a dict or the name of a JSON file, found {config!r:.100}. Pass config=..., or "
            "args with the attribute deepspeed_config"
        )
    return dict(tree)


def _decoded(text: str | Path) -> dict[str, Any] | None:
    """Return the dict of a JSON text in base64; None if ``text`` is no such text."""
    if Path(text).exists():
        return None
    with contextlib.suppress(ValueError):
        tree = json.loads(base64.urlsafe_b64decode(str(text)))
        return tree if isinstance(tree, dict) else None
    return None


def _plain(value: Any) -> Any:
    """Return a copy in which enums are their values, so that the dict is JSON."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else copy.copy(value)


def load_settings(config: Any, *, warns: bool = False) -> Config:
    """Return zeroengine's configuration of a DeepSpeed one, with DeepSpeed's own defaults.

    Args:
        config: As of ``read_settings``.
        warns: Whether rank 0 warns of a section that has no effect.

    Raises:
        ConfigError: A key is unknown, or asks for what zeroengine does not do. The message lists all of them.
    """
    tree = read_settings(config)
    # The engine under DeepSpeed's names reads these keys itself.
    for name in ("managed_gradient_accumulation", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"):
        tree.pop(name, None)
    tree.pop("dataloader_drop_last", None)
    if has_bf16_states(tree):
        for name in BF16_SECTIONS:
            if isinstance(tree.get(name), dict):
                tree[name].pop("bf16_optimizer_states", None)
        tree.setdefault("optimizer_state_dtype", "bf16")
    if isinstance(tree.get("optimizer"), dict):
        # Some write this beside "params", where DeepSpeed ignores it.
        tree["optimizer"].pop("torch_adam", None)
    zero = tree.get("zero_optimization")
    if isinstance(zero, dict):
        for name in ("enable_sanity_checks", "ignore_unused_parameters"):
            zero.pop(name, None)
        # The booleans of earlier versions became sections.
        for old, new in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_param", "offload_param"),
            ("cpu_offload_params", "offload_param"),
        ):
            if zero.pop(old, None) is True:
                zero.setdefault(new, {"device": "cpu"})
        section = zero.get("offload_param")
        device = (section.get("device") if isinstance(section, dict) else None) or "none"
        is_secondary = zero.get("zero_hpz_partition_size") not in (None, 0, 1)
        asked = {"offload_param": device != "none", "zero_hpz_partition_size": is_secondary}
        for name in [name for name, is_asked in asked.items() if is_asked and zero.get("stage", 0) in (0, 1, 2)]:
            # DeepSpeed ignores these there, and accelerate writes the first at every stage.
            notice = f'"{name}" has no effect below stage 3, as in DeepSpeed'
            log_dist(notice, ranks=[0], level=logging.WARNING if warns else logging.DEBUG)
            del zero[name]
    if tree.get("gradient_clipping") in (None, "auto"):
        tree["gradient_clipping"] = GRADIENT_CLIPPING_DEFAULT
    return load(tree)


def has_bf16_states(tree: Mapping[str, Any]) -> bool:
    """Return whether ``bf16_optimizer_states`` is on, DeepSpeed's key for ``"optimizer_state_dtype": "bf16"``."""
    sections = (tree.get(name) for name in BF16_SECTIONS)
    asked = ("enabled", "bf16_optimizer_states")
    return any(isinstance(section, dict) and all(section.get(key) is True for key in asked) for section in sections)


class DeepSpeedConfig:
    """What scripts read of DeepSpeed's parsed configuration.

    Args:
        config: A dict or the name of a file.
        mpu: The ranks that hold one model together, each group of which counts as one rank. None: as configured.
        mesh_device: Not used.

    Attributes:
        config: The resolved configuration of zeroengine.

    Raises:
        DeepSpeedConfigError: The batch sizes contradict one another.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: object = None) -> None:
        self._param_dict = read_settings(config)
        settings = load_settings(config)
        ranks_per_model = max(settings.tensor_parallel.autotp_size, 1)
        if mpu is not None and not isinstance(mpu, UlyssesSPAttentionHF):
            ranks_per_model = ask_mpu(mpu, "world_size", *MODEL)
        num_ranks = dist.get_world_size() if dist.is_initialized() else ranks_per_model
        self.world_size = num_ranks // ranks_per_model
        self.config = settings = settings.resolve(world_size=num_ranks, ranks_per_model=ranks_per_model)
        # null is the default, as a missing key is.
        self.managed_gradient_accumulation = self._param_dict.get("managed_gradient_accumulation") is not False
        self.gradient_allreduce_op = str(self._param_dict.get("gradient_allreduce_op") or "mean").lower()
        self.tag_validation = str((self._param_dict.get("checkpoint") or {}).get("tag_validation") or "WARN").upper()
        if self.tag_validation not in TAG_VALIDATIONS:
            raise DeepSpeedConfigError(
                f"checkpoint.tag_validation: write one of {list(TAG_VALIDATIONS)}, found {self.tag_validation!r}"
            )
        self.dataloader_drop_last = self._param_dict.get("dataloader_drop_last") is True
        data_types = self._param_dict.get("data_types") or {}
        self.param_dtype, self.buffer_dtype = data_types.get("param_dtype"), data_types.get("buffer_dtype")
        self.zero_force_ds_cpu_optimizer = self._param_dict.get("zero_force_ds_cpu_optimizer")
        self.zero_config = settings.zero_optimization
        if settings.zero_optimization.stage == "auto":
            raise DeepSpeedConfigError('zero_optimization.stage: found "auto"; write 0, 1, 2 or 3, which scripts read')
        self.zero_optimization_stage = int(settings.zero_optimization.stage)
        zero = self._param_dict.get("zero_optimization") or {}
        self.leaf_module, self.enable_sanity_checks = zero.get("leaf_module"), zero.get("enable_sanity_checks") is True
        self.ignore_unused_parameters = zero.get("ignore_unused_parameters") is not False
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config, self.bfloat16_config = settings.fp16, settings.bf16
        self.fp16_enabled, self.bfloat16_enabled = bool(settings.fp16.enabled), bool(settings.bf16.enabled)
        self.optimizer_name = self.optimizer_params = self.scheduler_name = self.scheduler_params = None
        if settings.optimizer is not None:
            self.optimizer_name, self.optimizer_params = settings.optimizer.type.lower(), settings.optimizer.params
        if settings.scheduler is not None:
            self.scheduler_name, self.scheduler_params = settings.scheduler.type, settings.scheduler.params

    def __getattr__(self, name: str) -> Any:
        """Return the value of a key of the resolved configuration, such as ``train_batch_size``."""
        if name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)


class DeepSpeedZeroConfig:
    """The section "zero_optimization": zeroengine's section, whose values are attributes, and ``leaf_module``.

    Args:
        section: The keys of the section.

    Raises:
        ConfigError: A key is unknown, or asks for what zeroengine does not do.
    """

    def __init__(self, **section: Any) -> None:
        leaf_module = section.pop("leaf_module", None) or {}
        self.leaf_module = DeepSpeedZeroLeafModuleConfig(**leaf_module)
        self._section = load_settings({"zero_optimization": section}).zero_optimization

    def __getattr__(self, name: str) -> Any:
        if name == "_section":
            raise AttributeError(name)
        return getattr(self._section, name)


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """Return the value of "gradient_clipping", or DeepSpeed's default."""
    value = param_dict.get("gradient_clipping")
    return GRADIENT_CLIPPING_DEFAULT if value is None else float(value)
