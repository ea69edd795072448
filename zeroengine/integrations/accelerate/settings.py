"""The arguments of `Accelerator` and the variables of `accelerate launch`, against the configuration.

[Note: Who decides what]
The configuration decides precision and partitioning, and accelerate decides how many micro-steps a step has. A key that
the configuration leaves open (absent, null or "auto") takes what accelerate knows. Where both say something and differ,
this is an error. `accelerate launch` sets ACCELERATE_MIXED_PRECISION to "no" if it is not told otherwise, so "no" from
the environment says nothing, and "no" as an argument is a statement.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ParallelismConfig,
)

from zeroengine.config import Config
from zeroengine.errors import ZeroEngineError

# The arguments and variables that choose another way of distributing a model, each with the key that replaces it.
REFUSED_ARGUMENTS = {
    "deepspeed_plugin": 'ZeroAccelerator(zero_config="zero3.json"); the keys of a DeepSpeed configuration are taken',
    "deepspeed_plugins": "one ZeroAccelerator for each configuration",
    "fsdp_plugin": '"zero_optimization": {"stage": 3} in the configuration',
    "megatron_lm_plugin": "no Megatron-LM plugin: there is data parallelism alone",
    "torch_tp_plugin": "no tensor parallelism: there is data parallelism alone",
}
REFUSED_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "--use_deepspeed",
    "ACCELERATE_USE_FSDP": "--use_fsdp",
    "ACCELERATE_USE_MEGATRON_LM": "--use_megatron_lm",
}
REFUSED_HANDLERS = {"FP8RecipeKwargs", "AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs"}
PARALLELISM_VARIABLE = "ACCELERATE_USE_PARALLELISM_CONFIG"
PRECISIONS = ("no", "fp16", "bf16")


def check_not_distributed_otherwise(arguments: Mapping[str, Any]) -> None:
    """Check that nothing asks accelerate to distribute the model by other means.

    Raises:
        ZeroEngineError: An argument or a variable of `accelerate launch` does.
    """
    for name, remedy in REFUSED_ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise ZeroEngineError(
                f"ZeroAccelerator({name}=...): zeroengine partitions the model. Leave {name} out, and write {remedy}."
            )
    for name, option in REFUSED_VARIABLES.items():
        if os.environ.get(name, "false").lower() in ("1", "true", "yes"):
            raise ZeroEngineError(
                f"the environment has {name}={os.environ[name]}, and zeroengine partitions the model. Leave {option} "
                "out of accelerate launch, or name another file with --config_file: the one that accelerate config "
                "wrote may say so, too."
            )
    for handler in arguments.get("kwargs_handlers") or ():
        if type(handler).__name__ in REFUSED_HANDLERS:
            raise ZeroEngineError(
                f"ZeroAccelerator(kwargs_handlers=[{type(handler).__name__}(...)]): zeroengine has no fp8. Write "
                '"bf16": {"enabled": true} in the configuration, and leave the handler out.'
            )
        if isinstance(handler, DistributedDataParallelKwargs) and handler.comm_hook != DDPCommunicationHookType.NO:
            raise ZeroEngineError(
                f"DistributedDataParallelKwargs(comm_hook={handler.comm_hook}): there is no "
                'DistributedDataParallel. Leave comm_hook out, and write "communication_data_type": "bf16" in the '
                "configuration to reduce gradients in that dtype."
            )


def fill_parallelism(config: Config, parallelism: ParallelismConfig | None) -> Config:
    """Return the configuration with the sizes of a `ParallelismConfig`, or of the variables of `accelerate launch`.

    Raises:
        ZeroEngineError: The configuration has other sizes, or they ask for other kinds of parallelism.
    """
    if os.environ.get(PARALLELISM_VARIABLE, "false").lower() in ("1", "true", "yes"):
        parallelism = parallelism or ParallelismConfig()
    for name in ("cp_size", "dp_replicate_size"):
        if (size := getattr(parallelism, name, 1)) > 1:
            raise ZeroEngineError(f"ParallelismConfig({name}={size}): write sp_size, for any kernel of attention")
    keys = {"sp_size": "sequence_parallel_size", "tp_size": "tensor_parallel.autotp_size"}
    sizes = {key: getattr(parallelism, name, 1) for name, key in keys.items()}
    values = {key: size if size > 1 else None for key, size in sizes.items()}
    return config.fill_auto(values, framework="ParallelismConfig")


def fill_precision(config: Config, requested: str | None) -> Config:
    """Return the configuration with the precision that accelerate was asked for, where it names none.

    Args:
        config: The configuration before `resolve`.
        requested: The argument `mixed_precision`; None if it was not given.

    Raises:
        ZeroEngineError: Both name a precision, and they differ.
    """
    variable = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    wanted = str(requested).lower() if requested is not None else variable
    origin = f'mixed_precision="{wanted}"' if requested is not None else f"ACCELERATE_MIXED_PRECISION={wanted}"
    if wanted not in PRECISIONS:
        raise ZeroEngineError(f"{origin}: zeroengine has {', '.join(PRECISIONS)}. Write one of them, or leave it out.")
    configured = precision_of(config)
    if configured == wanted or (wanted == "no" and requested is None):
        return config
    section = getattr(config, wanted) if wanted != "no" else None
    is_off = section is not None and section.enabled is False and "enabled" in section.model_fields_set
    if configured != "no" or is_off:
        remedy = f'"{wanted}": {{"enabled": true}}' if wanted != "no" else "no precision"
        raise ZeroEngineError(
            f"{origin}, and the configuration has {_describe_precision(config, wanted)}. Write {remedy} in the "
            f'configuration, or mixed_precision="{configured}".'
        )
    # With an argument of "no", "auto" stays open: a model in bf16 trains in bf16 under accelerate, too.
    if section is None:
        return config
    return config.model_copy(update={wanted: section.model_copy(update={"enabled": True})})


def precision_of(config: Config) -> str:
    """Return accelerate's word for the precision of a configuration: "no", "fp16" or "bf16"."""
    return "no" if config.precision == "fp32" else config.precision


def _describe_precision(config: Config, wanted: str) -> str:
    """Return the keys that set the precision, as they stand in a configuration."""
    if config.torch_autocast.enabled:
        return f'"torch_autocast": {{"enabled": true, "dtype": "{config.torch_autocast.dtype}"}}'
    configured = precision_of(config)
    return f'"{configured}": {{"enabled": true}}' if configured != "no" else f'"{wanted}": {{"enabled": false}}'


def fill_loss_scale(config: Config, handlers: Iterable[object]) -> Config:
    """Return the configuration with the loss scale of a `GradScalerKwargs` among `handlers`, if there is one.

    Raises:
        ZeroEngineError: The engine cannot scale the loss in this way, or the configuration has other values.
    """
    handler = next((handler for handler in handlers if isinstance(handler, GradScalerKwargs)), None)
    if handler is None:
        return config
    power = math.log2(handler.init_scale) if handler.init_scale > 0 else math.nan
    wrong = {
        "init_scale": not power.is_integer() and "a power of two",
        "growth_factor": handler.growth_factor != 2 and "2",
        "backoff_factor": handler.backoff_factor != 0.5 and "0.5",
        "enabled": not handler.enabled and "True",
    }
    for name, remedy in wrong.items():
        if remedy:
            raise ZeroEngineError(
                f"GradScalerKwargs({name}={getattr(handler, name)}): the engine doubles and halves the scale of the "
                f'loss. Write {remedy}, or leave the handler out and write "fp16" in the configuration.'
            )
    scale = {"fp16.initial_scale_power": int(power), "fp16.loss_scale_window": handler.growth_interval}
    return config.fill_auto(scale, framework="GradScalerKwargs")


def choose_accumulation(config: Config, arguments: Mapping[str, Any]) -> int:
    """Return the number of micro-steps of a step, from accelerate or else from the configuration.

    Args:
        config: The configuration before `resolve`.
        arguments: The arguments of `Accelerator`.

    Raises:
        ZeroEngineError: Both name a number, and they differ.
    """
    plugin: GradientAccumulationPlugin | None = arguments.get("gradient_accumulation_plugin")
    argument = int(
        os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", arguments.get("gradient_accumulation_steps", 1))
    )
    num_steps = argument if plugin is None else int(plugin.num_steps)
    configured = config.gradient_accumulation_steps
    if not isinstance(configured, int) or configured == num_steps:
        return num_steps
    # 1 is accelerate's default, which says nothing.
    if plugin is None and num_steps == 1:
        return configured
    raise ZeroEngineError(
        f"accelerate has gradient_accumulation_steps={num_steps}, and the configuration has "
        f'"gradient_accumulation_steps": {configured}. Write {num_steps} or "auto" in the configuration.'
    )


def fill_batch_size(config: Config, batch_sizes: list[int], num_steps: int, num_processes: int) -> Config:
    """Return the configuration of an engine, whose steps accelerate ends.

    Args:
        config: The configuration before `resolve`.
        batch_sizes: The number of samples of a rank in one batch, of each data loader that was prepared so far.
        num_steps: The number of micro-steps of a step.
        num_processes: The number of ranks, or of groups of ranks that share samples.

    Raises:
        ZeroEngineError: The configuration has a batch size that no loader has.
    """
    micro, train = config.train_micro_batch_size_per_gpu, config.train_batch_size
    if micro is None and train is not None:
        micro = max(1, train // (num_steps * num_processes))
    if micro is not None and batch_sizes and micro not in batch_sizes:
        sizes = " and ".join(map(str, sorted(set(batch_sizes))))
        raise ZeroEngineError(
            f"the configuration has a micro-batch size of {micro}, and the prepared data loader has {sizes}. Write "
            f'"train_micro_batch_size_per_gpu": "auto" in the configuration, or DataLoader(..., batch_size={micro}).'
        )
    micro = micro or (batch_sizes[0] if batch_sizes else 1)
    if train is not None and train != micro * num_steps * num_processes:
        raise ZeroEngineError(
            f'the configuration has "train_batch_size": {train}, and accelerate trains with {micro} samples x '
            f"{num_steps} micro-steps x {num_processes} ranks = {micro * num_steps * num_processes}. Write "
            '"train_batch_size": "auto".'
        )
    # The last step of an epoch may be shorter, and accelerate divides the loss itself.
    return config.with_manual_accumulation().model_copy(update={"train_micro_batch_size_per_gpu": micro})


def batch_size_of(loader: Any, settings: DataLoaderConfiguration, num_processes: int) -> int | None:
    """Return how many samples a rank gets from one batch of a loader that is not prepared yet; None if unknown."""
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        return None
    return max(1, size // num_processes) if settings.split_batches else size
