"""Which model an optimizer belongs to, by its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from zeroengine.engine.engine import Engine
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.parameter_engines import engines_of


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
