"""What `ZeroAccelerator` refuses, with what to write instead."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from zeroengine.comm.launched_ranks import has_peers
from zeroengine.config import Config
from zeroengine.engine.engine import Engine
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.parameter_engines import engines_of


def check_trains_with_peers(num_processes: int) -> None:
    """Check that accelerate trains with the processes that were started.

    Raises:
        ZeroEngineError: It trains in this process alone.
    """
    if num_processes == 1 and has_peers():
        raise ZeroEngineError(
            f"accelerate trains in one process, and {os.environ['WORLD_SIZE']} were started: its state was made "
            "before, without the CPUs. Make ZeroAccelerator first, or write Accelerator(cpu=True), "
            "PartialState(cpu=True) or TrainingArguments(use_cpu=True) there."
        )


def check_on_one_device(model: nn.Module, has_device_map: bool) -> None:
    """Check that a model is not distributed by `device_map`.

    Raises:
        ZeroEngineError: It is.
    """
    if has_device_map:
        raise ZeroEngineError(
            f"{type(model).__name__} was loaded with a device_map over several devices: zeroengine partitions it "
            "over the ranks. Load it without device_map."
        )


def check_is_not_trained(model: nn.Module, is_trained: bool) -> None:
    """Check that a model has no other optimizer.

    Raises:
        ZeroEngineError: It is trained with another one.
    """
    if is_trained:
        raise ZeroEngineError(
            f"{type(model).__name__} is trained by another optimizer already. Each model has one: use its param "
            "groups, or call accelerator.free_memory(model) first to start again."
        )


def check_one_schedule(schedule: object, config: Config) -> None:
    """Check that the configuration names no schedule beside the one that was passed.

    Raises:
        ZeroEngineError: It does.
    """
    if config.scheduler is not None:
        raise ZeroEngineError(
            f"there are two schedules: {type(schedule).__name__}, which was passed to prepare(), and "
            f"{config.scheduler.type}, which the configuration names. Remove the section scheduler from "
            "the configuration, or pass accelerate.utils.deepspeed.DummyScheduler(optimizer)."
        )


def check_all_have_optimizers(waiting: Sequence[nn.Module]) -> None:
    """Check that no model waits for its optimizer.

    Raises:
        ZeroEngineError: One does.
    """
    if waiting:
        raise ZeroEngineError(
            f"backward(): {type(waiting[0]).__name__} was prepared without its optimizer, and is not "
            "partitioned yet. Write model, optimizer = accelerator.prepare(model, optimizer), or prepare the "
            "optimizer as well."
        )


def check_unscaled(engines: Sequence[Engine]) -> None:
    """Check that a loss of several models is not scaled.

    Raises:
        ZeroEngineError: One of the engines scales it.
    """
    if any(engine.config.scales_loss for engine in engines):
        raise ZeroEngineError(
            f"backward() in fp16 with {len(engines)} models: each scales the loss by a number of its own. Write "
            "accelerator.backward(loss, model=model) with the model that this loss trains."
        )


def check_even_batches(even: bool, num_processes: int) -> None:
    """Check that all ranks have as many batches.

    Raises:
        ZeroEngineError: They may have different numbers of batches.
    """
    if not even and num_processes > 1:
        raise ZeroEngineError(
            "join_uneven_inputs(even_batches=False): every rank takes part in each gathering of parameters, so all "
            "need as many batches. Leave even_batches out, which repeats samples at the end of the data."
        )


def check_not_engines(engines: Sequence[Engine]) -> None:
    """Check that gradients to be clipped by value are no engine's.

    Raises:
        ZeroEngineError: They are.
    """
    if engines:
        raise ZeroEngineError(
            "clip_grad_value_(): gradients are reduced into buckets and partitioned. Write "
            "accelerator.clip_grad_norm_(model.parameters(), max_norm)."
        )


def check_step_ends(sync_gradients: bool) -> None:
    """Check that the micro-step in progress is the last one of a step.

    Raises:
        ZeroEngineError: It is not.
    """
    if not sync_gradients:
        raise ZeroEngineError(
            "clip_grad_norm_() before the last micro-step of a step. Write `if accelerator.sync_gradients:` above."
        )


def check_schedule(schedule: object, prepared: Sequence[object]) -> None:
    """Check that the optimizer of a schedule was prepared. A schedule without an optimizer is left to accelerate.

    Args:
        schedule: The schedule.
        prepared: The optimizers that were prepared, as accelerate's wrappers.

    Raises:
        ZeroEngineError: It was not, so that the schedule would change nothing that is trained.
    """
    optimizer = getattr(schedule, "optimizer", None)
    known = {id(inner) for wrapper in prepared for inner in (wrapper, getattr(wrapper, "optimizer", None))}
    if isinstance(optimizer, torch.optim.Optimizer) and id(optimizer) not in known:
        raise ZeroEngineError(
            f"prepare(): {type(schedule).__name__} is over another {type(optimizer).__name__} than those that were "
            "prepared, so it would change nothing. Make it over the optimizer that you prepare, and prepare both in "
            "one call: model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)."
        )


def engine_to_clip(params: Sequence[torch.Tensor], norm_type: float) -> Engine:
    """Return the engine whose gradient `clip_grad_norm_` clips.

    Args:
        params: The parameters that were passed, of which some belong to an engine.
        norm_type: The order of the norm.

    Raises:
        ZeroEngineError: The parameters are a part of a model or of several models, or it is another norm.
    """
    engines = engines_of(params)
    if norm_type != 2:
        raise ZeroEngineError(
            f"clip_grad_norm_(norm_type={norm_type}): the engine has the 2-norm. Leave norm_type out."
        )
    if len(engines) > 1:
        raise ZeroEngineError(
            "clip_grad_norm_() was given parameters of several models: call it for each model by itself."
        )
    given = {id(param) for param in params}
    named = engines[0].module.named_parameters()
    left_out = next((name for name, param in named if param.requires_grad and id(param) not in given), None)
    if left_out is not None:
        raise ZeroEngineError(
            f"clip_grad_norm_() was given a part of the model, without {left_out}: the engine clips the gradient of "
            "the whole model. Write accelerator.clip_grad_norm_(model.parameters(), max_norm)."
        )
    return engines[0]
