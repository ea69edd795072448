"""DeepSpeed's module paths: which object each name of each module is here.

Scripts and frameworks import from deep inside DeepSpeed, such as ``deepspeed.runtime.zero.partition_parameters``. This
file has a table of these modules. ``install_modules`` makes one module object for each row, below this package. A name
that is not in the table raises AttributeError (ImportError in ``from ... import``), with what is served.
"""

from __future__ import annotations

import enum
import os
import sys
from types import ModuleType
from typing import Any

import torch

from zeroengine.integrations.deepspeed import (
    accelerator,
    checkpointing,
    comm,
    engine,
    leaf_modules,
    lr_schedules,
    ops,
    optimizer,
    parameters,
    script_utils,
    settings,
    tiling,
    torch_autocast,
    unavailable,
    zero,
    zero_to_fp32,
)

PACKAGE = "zeroengine.integrations.deepspeed"


class OffloadDeviceEnum(str, enum.Enum):
    """Where a state lives."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """The states that ``offload_states`` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(enum.IntEnum):
    """The stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class ServedModule(ModuleType):
    """A module of DeepSpeed's whose names are zeroengine's objects."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        served = ", ".join(sorted(key for key in vars(self) if not key.startswith("_"))) or "nothing"
        path = self.__name__.removeprefix(f"{PACKAGE}.")
        raise AttributeError(
            f"deepspeed.{path}.{name} is internal to DeepSpeed and is not served by zeroengine, which serves of this "
            f"module: {served}"
        )


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of nested containers whose tensors are copied to ``device``."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


_CLASSES, _FUNCTIONS = unavailable.CLASSES, unavailable.FUNCTIONS
_PARAMETER_FUNCTIONS = {name: value for name, value in vars(parameters).items() if name.startswith("safe_")}
_LEAF_FUNCTIONS = {name: value for name, value in vars(leaf_modules).items() if "z3_leaf" in name}
_SCHEDULE_KEYS = {
    key.upper(): key
    for key in (
        "cos_min_ratio cycle_first_stair_count cycle_first_step_size cycle_max_lr cycle_max_mom cycle_min_lr "
        "cycle_min_mom cycle_second_stair_count cycle_second_step_size decay_lr_rate decay_mom_rate decay_step_size "
        "edge_value lr_range_test_min_lr lr_range_test_staircase lr_range_test_step_rate lr_range_test_step_size "
        "mid_value total_num_steps warmup_max_lr warmup_min_lr warmup_min_ratio warmup_num_steps warmup_type"
    ).split()
}
_PARTITION_PARAMETERS = {
    "GatheredParameters": zero.GatheredParameters,
    "Init": zero.Init,
    "MultipleAllGatherHandles": zero.MultipleAllGatherHandles,
    "ZeroParamStatus": parameters.ZeroParamStatus,
    "ZeroParamType": parameters.ZeroParamType,
    "is_zero_param": zero.is_zero_param,
    "register_external_parameter": zero.register_external_parameter,
    "unregister_external_parameter": zero.unregister_external_parameter,
}
_SECTIONS = {name: kind for name, kind in _CLASSES.items() if name.startswith("DeepSpeedZero")}
_PIPE = {name: _CLASSES[name] for name in ("LayerSpec", "PipelineModule", "TiedLayerSpec")}
_TILING = {"TiledLinear": tiling.TiledLinear, "TiledLinearReturnBias": tiling.TiledLinearReturnBias}
_ADAMS = {"DeepSpeedCPUAdam": ops.DeepSpeedCPUAdam, "FusedAdam": ops.FusedAdam}

# The names of each module, by its path below ``deepspeed``.
MODULES: dict[str, dict[str, Any]] = {
    "checkpoint": {},
    "checkpoint.utils": {
        "clone_tensors_for_torch_save": clone_tensors_for_torch_save,
        "get_model_ckpt_name_for_rank": _FUNCTIONS["get_model_ckpt_name_for_rank"],
    },
    "comm.comm": {"init_distributed": comm.init_distributed},
    "git_version_info": {
        "torch_info": {"version": "0.0", "bf16_support": True, "cuda_version": "0.0", "nccl_version": "0.0"}
    },
    "launcher": {},
    # accelerate's launcher writes variables into this file for several nodes.
    "launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": os.environ.get("DS_ENV_FILE", ".deepspeed_env")},
    "moe": {},
    "moe.layer": {"MoE": _CLASSES["MoE"]},
    "moe.utils": {
        "has_moe_layers": lambda model: (False, 0),
        "is_moe_param": lambda param: False,
        "split_params_into_different_moe_groups_for_optimizer": lambda groups, **options: groups,
    },
    "ops.adagrad": {"DeepSpeedCPUAdagrad": ops.DeepSpeedCPUAdagrad},
    "ops.adam": _ADAMS,
    "ops.adam.cpu_adam": {"DeepSpeedCPUAdam": ops.DeepSpeedCPUAdam},
    "ops.adam.fused_adam": {"FusedAdam": ops.FusedAdam},
    "ops.aio": {"AsyncIOBuilder": ops.BUILDERS["AsyncIOBuilder"]},
    "ops.lamb": {"FusedLamb": _CLASSES["FusedLamb"]},
    "ops.lion": {"DeepSpeedCPULion": ops.DeepSpeedCPULion, "FusedLion": ops.FusedLion},
    "ops.op_builder": {"OpBuilder": ops.OpBuilder, **ops.BUILDERS},
    "ops.op_builder.builder": {"OpBuilder": ops.OpBuilder},
    "pipe": _PIPE,
    "runtime": {},
    "runtime.activation_checkpointing": {"checkpointing": checkpointing},
    "runtime.base_optimizer": {
        "DeepSpeedOptimizer": optimizer.DeepSpeedOptimizer,
        "ZeROOptimizer": optimizer.DeepSpeedOptimizer,
    },
    "runtime.bf16_optimizer": {"BF16_Optimizer": _CLASSES["BF16_Optimizer"]},
    "runtime.config": {
        "ADAM_OPTIMIZER": "adam",
        "ADAMW_OPTIMIZER": "adamw",
        "DeepSpeedConfig": settings.DeepSpeedConfig,
        "DeepSpeedConfigError": settings.DeepSpeedConfigError,
        "get_gradient_clipping": settings.get_gradient_clipping,
    },
    "runtime.constants": {"GRADIENT_CLIPPING_DEFAULT": settings.DEFAULT_GRADIENT_CLIPPING},
    "runtime.dataloader": {"RepeatingLoader": script_utils.RepeatingLoader},
    "runtime.engine": {"DeepSpeedEngine": engine.DeepSpeedEngine},
    "runtime.fp16": {},
    "runtime.fp16.fused_optimizer": {"FP16_Optimizer": _CLASSES["FP16_Optimizer"]},
    "runtime.fp16.unfused_optimizer": {"FP16_UnfusedOptimizer": _CLASSES["FP16_UnfusedOptimizer"]},
    "runtime.lr_schedules": {
        **lr_schedules.SCHEDULES,
        **_SCHEDULE_KEYS,
        "LR_RANGE_TEST": "LRRangeTest",
        "LR_SCHEDULE": "lr_schedule",
        "ONE_CYCLE": "OneCycle",
        "VALID_LR_SCHEDULES": list(lr_schedules.SCHEDULES),
        "WARMUP_COSINE_LR": "WarmupCosineLR",
        "WARMUP_DECAY_LR": "WarmupDecayLR",
        "WARMUP_LINEAR_RATE": "linear",
        "WARMUP_LOG_RATE": "log",
        "WARMUP_LR": "WarmupLR",
    },
    "runtime.pipe": _PIPE,
    "runtime.pipe.module": _PIPE,
    "runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 1024 * 1024},
    "runtime.utils": {"see_memory_usage": script_utils.see_memory_usage},
    "runtime.zero": {
        **_PARTITION_PARAMETERS,
        **_TILING,
        "MiCS_Init": zero.Init,
        "unwrap_model_for_generation": zero.unwrap_model_for_generation,
    },
    "runtime.zero.config": {
        **_SECTIONS,
        "DeepSpeedZeroConfig": settings.DeepSpeedZeroConfig,
        "OffloadDeviceEnum": OffloadDeviceEnum,
        "ZeroStageEnum": ZeroStageEnum,
    },
    "runtime.zero.leaf_module_config": {
        name: value
        for name, value in vars(leaf_modules).items()
        if name.startswith(("DEFAULT_LEAF", "DeepSpeedZeroLeaf"))
    },
    "runtime.zero.mics": {"MiCS_Init": zero.Init},
    "runtime.zero.offload_config": {
        **_SECTIONS,
        "OffloadDeviceEnum": OffloadDeviceEnum,
        "OffloadStateTypeEnum": OffloadStateTypeEnum,
    },
    "runtime.zero.partition_parameters": {
        **_PARTITION_PARAMETERS,
        # transformers replaces the first while it builds a model in zero.Init. Init here leaves constructors alone.
        "zero_wrapper_for_fp_tensor_constructor": lambda constructor, *arguments, **options: constructor,
        "_orig_torch_arange": torch.arange,
        "get_allgather_dtype": torch_autocast.get_allgather_dtype,
        # The shape of a parameter whose values are not on this rank.
        "partitioned_param_data_shape": [0],
    },
    "runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": optimizer.DeepSpeedZeroOptimizer_Stage3,
        "unwrap_model_for_generation": zero.unwrap_model_for_generation,
    },
    "runtime.zero.stage_1_and_2": {"DeepSpeedZeroOptimizer": optimizer.DeepSpeedZeroOptimizer},
    "runtime.zero.tiling": _TILING,
    "runtime.zero.utils": {"ZeRORuntimeException": settings.ZeRORuntimeException, "is_zero_param": zero.is_zero_param},
    "utils": {
        "OnDevice": script_utils.OnDevice,
        "RepeatingLoader": script_utils.RepeatingLoader,
        "instrument_w_nvtx": script_utils.instrument_w_nvtx,
        "log_dist": script_utils.log_dist,
        "logger": script_utils.logger,
        "set_log_level_from_string": script_utils.set_log_level_from_string,
        **_LEAF_FUNCTIONS,
        **_PARAMETER_FUNCTIONS,
    },
    "utils.groups": {
        "_get_data_parallel_group": comm.get_world_group,
        "_get_data_parallel_rank": comm.get_rank,
        "_get_data_parallel_world_size": comm.get_world_size,
    },
    "utils.logging": {"log_dist": script_utils.log_dist, "logger": script_utils.logger},
    "utils.tensor_fragment": _PARAMETER_FUNCTIONS,
    "utils.torch": {"required_torch_version": script_utils.required_torch_version},
    "utils.z3_leaf_module": _LEAF_FUNCTIONS,
}
# Modules of this package that have a second path in DeepSpeed.
ALIASES: dict[str, ModuleType] = {
    "accelerator": accelerator,
    "accelerator.real_accelerator": accelerator,
    "checkpointing": checkpointing,
    "comm": comm,
    "ops": ops,
    "runtime.activation_checkpointing.checkpointing": checkpointing,
    "runtime.torch_autocast": torch_autocast,
    "utils.zero_to_fp32": zero_to_fp32,
    "zero": zero,
}


def install_modules() -> None:
    """Make the modules of the tables importable below this package."""
    installed: dict[str, ModuleType] = dict(ALIASES)
    for path, names in MODULES.items():
        module = ServedModule(f"{PACKAGE}.{path}", "Names of DeepSpeed's module of this path.")
        vars(module).update(names)
        installed[path] = module
    for path, served in installed.items():
        # With this attribute a module counts as a package, whose submodules Python then finds in sys.modules.
        vars(served).setdefault("__path__", [])
        sys.modules[f"{PACKAGE}.{path}"] = served
        above, _, name = path.rpartition(".")
        parent = installed[above] if above else sys.modules[PACKAGE]
        # deepspeed.utils has a function with the name of one of its modules, and the function is what scripts mean.
        if not callable(vars(parent).get(name)):
            setattr(parent, name, served)
