"""The engines that `prepare` makes: for a model with its optimizer, and for a model that is not trained."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin, compile_regions
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from accelerate.utils.operations import convert_to_fp32
from torch import nn

from zeroengine.config import Config
from zeroengine.engine.engine import Engine
from zeroengine.engine.initialize import initialize
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.accelerate.settings import precision_of
from zeroengine.integrations.accelerate.wrappers import ZeroAcceleratedOptimizer


def parameters_of(optimizer: torch.optim.Optimizer | DummyOptim) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, or those that stand for one."""
    groups = optimizer.params if isinstance(optimizer, DummyOptim) else optimizer.param_groups
    return [param for group in groups for param in (group["params"] if isinstance(group, dict) else [group])]


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that require a gradient."""
    return [param for param in model.parameters() if param.requires_grad]


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
    is_dummy = isinstance(optimizer, DummyOptim)
    if is_dummy and config.optimizer is None:
        raise ZeroEngineError(
            'DummyOptim stands for the optimizer of the configuration, which has none. Write "optimizer": '
            '{"type": "AdamW", "params": {"lr": "auto"}}, or pass a torch.optim optimizer.'
        )
    if not is_dummy and config.optimizer is not None:
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
    base = None if is_dummy else optimizer
    make_schedule = None if schedule is None else schedule.lr_scheduler_callable
    engine = initialize(model, base, configure(values), lr_scheduler=make_schedule)
    _convert_outputs(engine)
    return ZeroAcceleratedOptimizer(engine, engine.optimizer if base is None else base)


def make_evaluation_engine(model: nn.Module, config: Config) -> Engine:
    """Partition a model that is not trained. Its parameters may be trainable, and stay so.

    Args:
        model: The model.
        config: The configuration before `resolve`.
    """
    config = config.model_copy(update={"optimizer": None, "scheduler": None})
    trainable = trainable_parameters(model)
    if trainable and config.low_precision is not None:
        # The model may be trained later, so its values must not be rounded.
        autocast = config.torch_autocast.model_copy(update={"enabled": True, "dtype": precision_of(config)})
        off = {name: getattr(config, name).model_copy(update={"enabled": False}) for name in ("bf16", "fp16")}
        config = config.model_copy(update={**off, "torch_autocast": autocast})
    with frozen(model):
        engine = initialize(model, None, config)
    _convert_outputs(engine)
    return engine


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Freeze the parameters of a model inside the block, as its engine for evaluation knows them.

    Outside they stay trainable, because an optimizer that is made later chooses its parameters by this flag.
    """
    trainable = trainable_parameters(model)
    for param in trainable:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in trainable:
            param.requires_grad_(True)


def _convert_outputs(engine: Engine) -> None:
    """Give the outputs of a model under autocast in fp32, as accelerate does."""
    if engine.config.autocast_dtype is not None:
        engine.module.register_forward_hook(_outputs_in_fp32)


def _outputs_in_fp32(module: nn.Module, args: Any, output: Any) -> Any:
    return convert_to_fp32(output)
