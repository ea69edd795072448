"""The optimizer that the caller or the configuration asks for, over the model's own parameters."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zeroengine.config import Config
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.lion import Lion

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None


def make_optimizer(optimizer: OptimizerLike, model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """An optimizer whose groups hold exactly the model's trainable parameters (frozen ones may be among them).

    Args:
        optimizer: an instance over the model's parameters, a callable that takes them, or None to build what
            ``config.optimizer`` says.

    Raises:
        ZeroEngineError: there is none, or it is over other parameters, or it leaves trainable ones out.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if isinstance(optimizer, torch.optim.Optimizer):
        found = _unwrapped(optimizer)
    elif optimizer is not None:
        if not callable(optimizer):
            raise ZeroEngineError(
                f"optimizer is a torch.optim.Optimizer, a callable that takes parameters, or None; found {optimizer!r}"
            )
        found = optimizer(trainable)
        if not isinstance(found, torch.optim.Optimizer):
            raise ZeroEngineError(f"the optimizer callable returned {found!r}, not a torch.optim.Optimizer")
    elif config.optimizer is not None:
        if not trainable:
            raise ZeroEngineError("every parameter of the model is frozen (requires_grad is False): nothing to train")
        found = _by_name(config.optimizer.type, trainable, dict(config.optimizer.params))
    else:
        raise ZeroEngineError(
            "no optimizer: pass one to initialize(model, optimizer, config), or name one in the configuration, such as "
            '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}'
        )
    _check_parameters(found, model)
    return found


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrapper, which forwards to it and has no rule of its own."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    return optimizer


def _by_name(kind: str, params: list[nn.Parameter], hyperparameters: dict[str, Any]) -> torch.optim.Optimizer:
    cls = _imported(kind) if "." in kind else Lion if kind == "Lion" else getattr(torch.optim, kind)
    # The decorated add_param_group imports torch._dynamo: 70 MB and a second or two at every start.
    light = {"add_param_group": add_param_group} if cls.add_param_group is _decorated else {}
    try:
        built: torch.optim.Optimizer = type(cls.__name__, (cls,), light)(params, **hyperparameters)
    except Exception as error:
        raise ZeroEngineError(
            f"optimizer.params: {kind} cannot be made with {hyperparameters}: {error}. It takes "
            f"{inspect.signature(cls)}."
        ) from error
    return built


def _imported(path: str) -> type[torch.optim.Optimizer]:
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module does when it is imported
        raise ZeroEngineError(
            f'optimizer.type "{path}" cannot be imported: {error}. Write the import path of an optimizer class, such '
            'as "torch.optim.RAdam", in a package that every rank can import.'
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ZeroEngineError(f'optimizer.type "{path}" is {cls!r}, not a subclass of torch.optim.Optimizer')
    return cls


_decorated = torch.optim.Optimizer.add_param_group
add_param_group = getattr(_decorated, "__wrapped__", _decorated)


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    names = {param: name for name, param in model.named_parameters()}
    kind = type(optimizer).__name__
    held: set[nn.Parameter] = set()
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in names:
                raise ZeroEngineError(
                    f"{kind}: param_groups[{index}]['params'][{position}], of shape {tuple(param.shape)}, is not a "
                    "parameter of the model. Build the optimizer from model.parameters() of the model passed to "
                    "initialize(), after any change of its modules."
                )
            held.add(param)
    missing = [name for param, name in names.items() if param.requires_grad and param not in held]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ZeroEngineError(
            f"{kind} leaves out trainable parameters: {', '.join(missing[:3])}{more}. Add them to a group, or freeze "
            "them with requires_grad_(False)."
        )
