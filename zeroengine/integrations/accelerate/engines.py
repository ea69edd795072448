"""The engines that `prepare` makes for a model with its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin, compile_regions
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn

from zeroengine.config import Config
from zeroengine.engine.initialize import initialize
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.accelerate.wrappers import ZeroAcceleratedOptimizer


def parameters_of(optimizer: torch.optim.Optimizer | DummyOptim) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, or those that stand for one."""
    groups = optimizer.params if isinstance(optimizer, DummyOptim) else optimizer.param_groups
    return [param for group in groups for param in (group["params"] if isinstance(group, dict) else [group])]


def model_of(params: Iterable[torch.Tensor], models: Sequence[nn.Module]) -> nn.Module:
    """Return the model that an optimizer's parameters are of.

    Args:
        params: The parameters of the optimizer.
        models: The models that were prepared.

    Raises:
        ZeroEngineError: The parameters are of no prepared model, or of several.
    """
    ids = {id(param) for param in params}
    owners = [model for model in models if any(id(param) in ids for param in model.parameters())]
    if not owners:
        classes = ", ".join(type(model).__name__ for model in models) or "none"
        raise ZeroEngineError(
            f"prepare(): the optimizer has parameters of none of the prepared models ({classes}). Make it over the "
            "parameters of the model that you prepare, torch.optim.AdamW(model.parameters()), and prepare both in one "
            "call: model, optimizer = accelerator.prepare(model, optimizer)."
        )
    if len(owners) > 1:
        classes = ", ".join(type(model).__name__ for model in owners)
        raise ZeroEngineError(
            f"prepare(): the optimizer has parameters of several models ({classes}). Each model has an engine of its "
            "own: make an optimizer for each, or put the models into one torch.nn.Module."
        )
    return owners[0]


def compiled(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """Return a model compiled as accelerate was asked to, or the model itself."""
    if plugin.backend == DynamoBackend.NO:
        return model
    options = plugin.to_kwargs()
    compile_model: Any = compile_regions if plugin.use_regional_compilation else torch.compile
    module: nn.Module = compile_model(model, **options)
    return module


def make_training_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | DummyOptim,
    schedule: DummyScheduler | None,
    configure: Callable[[Mapping[str, Any]], Config],
    batches_per_update: int,
) -> ZeroAcceleratedOptimizer:
    """Partition a model with its optimizer.

    Args:
        model: The model.
        optimizer: An optimizer over it, or a `DummyOptim`, which stands for the one of the configuration.
        schedule: A `DummyScheduler`, which stands for the schedule of the configuration.
        configure: Returns the configuration with values by dotted key in the place of "auto".
        batches_per_update: By how much accelerate's count of steps in a `DummyScheduler` exceeds the updates.

    Returns:
        The optimizer that the training loop calls. It has the engine.

    Raises:
        ZeroEngineError: There are two optimizers, or none.
    """
    config = configure({})
    base = None if isinstance(optimizer, DummyOptim) else optimizer
    if base is None and config.optimizer is None:
        raise ZeroEngineError(
            'DummyOptim stands for the optimizer of the configuration, which has none. Write "optimizer": '
            '{"type": "AdamW", "params": {"lr": "auto"}}, or pass a torch.optim optimizer.'
        )
    if base is not None and config.optimizer is not None:
        raise ZeroEngineError(
            f"there are two optimizers: {type(optimizer).__name__}, which was passed to prepare(), and "
            f"{config.optimizer.type}, which the configuration names. Remove the section optimizer from the "
            "configuration, or pass accelerate.utils.deepspeed.DummyOptim(model.parameters())."
        )
    values: dict[str, Any] = {}
    if isinstance(optimizer, DummyOptim):
        values |= {"optimizer.params.lr": optimizer.lr, "optimizer.params.weight_decay": optimizer.weight_decay}
    if schedule is not None and config.scheduler is not None:
        total = schedule.total_num_steps
        values["scheduler.params.total_num_steps"] = None if total is None else math.ceil(total / batches_per_update)
        values["scheduler.params.warmup_num_steps"] = schedule.warmup_num_steps
    make_schedule = None if schedule is None else schedule.lr_scheduler_callable
    engine = initialize(model, base, configure(values), lr_scheduler=make_schedule)
    return ZeroAcceleratedOptimizer(engine, engine.optimizer if base is None else base)
