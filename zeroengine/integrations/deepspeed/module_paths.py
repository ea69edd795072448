"""DeepSpeed's module paths: which object each name of each module is here.

Scripts and frameworks import from deep inside DeepSpeed, such as ``deepspeed.runtime.zero.partition_parameters``. This
file has a table of these modules. ``install_modules`` makes one module object for each row, below this package. A name
that is not in the table raises AttributeError (ImportError in ``from ... import``), with what is served.
"""

from __future__ import annotations

import inspect
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
    muon,
    ops,
    optimizer,
    parameters,
    script_utils,
    settings,
    torch_autocast,
    ulysses_sp,
    unavailable,
    zero,
    zero_to_fp32,
)
from zeroengine.utils.tensors import map_tensors

PACKAGE = "zeroengine.integrations.deepspeed"


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


_PARAMETER_FUNCTIONS = " ".join(name for name in vars(parameters) if name.startswith("safe_"))
_LEAF_FUNCTIONS = " ".join(name for name in vars(leaf_modules) if "z3_leaf" in name)
_PARTITION_PARAMETERS = (
    "GatheredParameters Init MultipleAllGatherHandles ZeroParamStatus ZeroParamType is_zero_param "
    "register_external_parameter unregister_external_parameter"
)
_SECTIONS = "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum"
_TILING = "TiledLinear TiledLinearReturnBias"
# The keys of schedules, which DeepSpeed has as constants.
_SCHEDULE_KEYS = {
    name.upper(): name
    for kind in lr_schedules.SCHEDULES.values()
    for name in inspect.signature(kind).parameters
    if name not in ("optimizer", "last_batch_iteration")
}

# The modules of this package that define what the table names.
_DEFINING_MODULES: list[ModuleType] = [
    *(comm, engine, leaf_modules, lr_schedules, muon, ops, optimizer, parameters),
    *(script_utils, settings, torch_autocast, ulysses_sp, zero),
]
_OBJECTS: dict[str, Any] = {name: value for module in _DEFINING_MODULES for name, value in vars(module).items()}
_OBJECTS |= {**unavailable.NAMES, **ops.BUILDERS, **_SCHEDULE_KEYS}
# What only scripts have a use for.
_OBJECTS |= {
    "ADAM_OPTIMIZER": "adam",
    "ADAMW_OPTIMIZER": "adamw",
    # accelerate's launcher writes variables into this file for several nodes.
    "DEEPSPEED_ENVIRONMENT_NAME": os.environ.get("DS_ENV_FILE", ".deepspeed_env"),
    "LR_RANGE_TEST": "LRRangeTest",
    "LR_SCHEDULE": "lr_schedule",
    "MIN_SWAPPABLE_BYTES": 1024 * 1024,
    "ONE_CYCLE": "OneCycle",
    "VALID_LR_SCHEDULES": list(lr_schedules.SCHEDULES),
    "WARMUP_COSINE_LR": "WarmupCosineLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_LINEAR_RATE": "linear",
    "WARMUP_LOG_RATE": "log",
    "WARMUP_LR": "WarmupLR",
    "ZeROOptimizer": optimizer.DeepSpeedOptimizer,
    "_get_data_parallel_group": comm.get_world_group,
    "_get_data_parallel_rank": comm.get_rank,
    "_get_data_parallel_world_size": comm.get_world_size,
    "_orig_torch_arange": torch.arange,
    "_get_sequence_parallel_group": lambda: ulysses_sp.present_unit().get_sequence_parallel_group(),
    "_get_sequence_parallel_rank": lambda: ulysses_sp.present_unit().get_sequence_parallel_rank(),
    "_get_sequence_parallel_world_size": lambda: ulysses_sp.present_unit().size,
    **dict.fromkeys(("Muon", "SingleDeviceMuon"), muon.make_muon),
    "SingleDeviceMuonWithAuxAdam": muon.MuonWithAuxAdam,
    "checkpointing": checkpointing,
    "has_moe_layers": lambda model: (False, 0),
    "is_moe_param": lambda param: False,
    "move_to_device": lambda item, device, *criterion: map_tensors(lambda tensor: tensor.to(device), item),
    # The shape of a parameter whose values are not on this rank.
    "partitioned_param_data_shape": [0],
    "split_params_into_different_moe_groups_for_optimizer": lambda groups, **options: groups,
    "torch_info": {"version": "0.0", "bf16_support": True, "cuda_version": "0.0", "nccl_version": "0.0"},
    # transformers replaces this while it builds a model in zero.Init. Init here leaves constructors alone.
    "zero_wrapper_for_fp_tensor_constructor": lambda constructor, *arguments, **options: constructor,
}

# The names of each module, by its path below ``deepspeed``.
_NAMES = {
    **dict.fromkeys(("checkpoint", "launcher", "moe", "runtime", "runtime.fp16", "runtime.zero.muon"), ""),
    **dict.fromkeys(("pipe", "runtime.pipe", "runtime.pipe.module"), "LayerSpec PipelineModule TiedLayerSpec"),
    "checkpoint.utils": "clone_tensors_for_torch_save get_model_ckpt_name_for_rank",
    "comm.comm": "init_distributed",
    "git_version_info": "torch_info",
    "launcher.runner": "DEEPSPEED_ENVIRONMENT_NAME",
    "moe.layer": "MoE",
    "moe.utils": "has_moe_layers is_moe_param split_params_into_different_moe_groups_for_optimizer",
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "ops.adam.cpu_adam": "DeepSpeedCPUAdam",
    "ops.adam.fused_adam": "FusedAdam",
    "ops.aio": "AsyncIOBuilder",
    "ops.lamb": "FusedLamb",
    "ops.lion": "DeepSpeedCPULion FusedLion",
    "ops.op_builder": " ".join(["OpBuilder", *ops.BUILDERS]),
    "ops.op_builder.builder": "OpBuilder",
    "runtime.activation_checkpointing": "checkpointing",
    "runtime.base_optimizer": "DeepSpeedOptimizer ZeROOptimizer",
    "runtime.bf16_optimizer": "BF16_Optimizer",
    "runtime.config": "ADAMW_OPTIMIZER ADAM_OPTIMIZER DeepSpeedConfig DeepSpeedConfigError get_gradient_clipping",
    "runtime.constants": "GRADIENT_CLIPPING_DEFAULT",
    "runtime.dataloader": "RepeatingLoader",
    "runtime.engine": "DeepSpeedEngine",
    "runtime.fp16.fused_optimizer": "FP16_Optimizer",
    "runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
    "runtime.lr_schedules": " ".join([*lr_schedules.SCHEDULES, *_SCHEDULE_KEYS])
    + " LR_RANGE_TEST LR_SCHEDULE ONE_CYCLE VALID_LR_SCHEDULES WARMUP_COSINE_LR WARMUP_DECAY_LR WARMUP_LINEAR_RATE "
    "WARMUP_LOG_RATE WARMUP_LR",
    "runtime.sequence_parallel": "",
    "runtime.sequence_parallel.ulysses_sp": "TiledFusedLogitsLoss TiledMLP UlyssesSPAttentionHF "
    "UlyssesSPDataLoaderAdapter sequence_tiled_compute",
    "runtime.swap_tensor": "MIN_SWAPPABLE_BYTES",
    "runtime.utils": "move_to_device see_memory_usage",
    "runtime.zero": f"{_PARTITION_PARAMETERS} {_TILING} MiCS_Init unwrap_model_for_generation",
    "runtime.zero.config": f"{_SECTIONS} DeepSpeedZeroConfig ZeroStageEnum",
    "runtime.zero.leaf_module_config": (
        "DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES DEFAULT_LEAF_MODULE_NAME_SUFFIXES "
        "DeepSpeedZeroLeafModuleConfig"
    ),
    "runtime.zero.mics": "MiCS_Init",
    "runtime.zero.muon.muon_optimizer": "MuonWithAuxAdam",
    "runtime.zero.muon.original_muon": "Muon MuonWithAuxAdam SingleDeviceMuon SingleDeviceMuonWithAuxAdam",
    "runtime.zero.offload_config": f"{_SECTIONS} OffloadStateTypeEnum",
    "runtime.zero.partition_parameters": f"{_PARTITION_PARAMETERS} _orig_torch_arange get_allgather_dtype "
    "partitioned_param_data_shape zero_wrapper_for_fp_tensor_constructor",
    "runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3 unwrap_model_for_generation",
    "runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "runtime.zero.tiling": _TILING,
    "runtime.zero.utils": "ZeRORuntimeException is_zero_param",
    "utils": "OnDevice RepeatingLoader instrument_w_nvtx log_dist logger set_log_level_from_string "
    f"{_LEAF_FUNCTIONS} {_PARAMETER_FUNCTIONS}",
    "utils.groups": "_get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size "
    "_get_sequence_parallel_group _get_sequence_parallel_rank _get_sequence_parallel_world_size",
    "utils.logging": "log_dist logger",
    "utils.tensor_fragment": _PARAMETER_FUNCTIONS,
    "utils.torch": "required_torch_version",
    "utils.z3_leaf_module": _LEAF_FUNCTIONS,
}
MODULES = {path: {name: _OBJECTS[name] for name in names.split()} for path, names in _NAMES.items()}
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
