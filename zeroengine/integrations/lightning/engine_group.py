"""The engines of one Lightning strategy, one for each optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroengine.engine.engine import Engine
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.process_groups import run_collective


def wrappable(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a second object of the same optimizer, with the same attributes, for Lightning to wrap.

    Lightning's wrappers derive from the class of the optimizer, and forward only what that class does not have. So they
    would not call the ``zero_grad`` that the engine put on the instance. The class of the second object has one.
    """
    cls = type(optimizer)

    def step(self: object, *args: Any, **kwargs: Any) -> Any:
        # The engine redirects the steps of the original object alone. An attribute ``step`` of the instance, which
        # schedules set on both objects, would lead back here.
        return cls.step(optimizer, *args, **kwargs)

    def zero_grad(self: object, set_to_none: bool = True) -> None:
        optimizer.zero_grad(set_to_none)

    derived = type(cls.__name__, (cls,), {"__module__": cls.__module__, "step": step, "zero_grad": zero_grad})
    second: torch.optim.Optimizer = object.__new__(derived)
    second.__dict__ = optimizer.__dict__
    return second


def is_same_optimizer(first: object, second: object) -> bool:
    """Return whether two objects are one optimizer, which ``wrappable`` may have made a second object of."""
    return hasattr(first, "__dict__") and hasattr(second, "__dict__") and vars(first) is vars(second)


class EngineGroup:
    """Finds the engine of an optimizer, and does for all engines what Lightning asks of a strategy.

    Attributes:
        engines: The engines, in the order in which they were added.
    """

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self._optimizers: list[torch.optim.Optimizer] = []

    def add(self, engine: Engine, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Add an engine, and the optimizer that it was made with. None: the engine built its own."""
        self.engines.append(engine)
        self._optimizers.append(engine.optimizer if optimizer is None else wrappable(optimizer))

    def find(self, optimizer: torch.optim.Optimizer, call: str) -> Engine:
        """Return the engine that was made with ``optimizer``.

        Raises:
            ZeroEngineError: There is none. ``call`` names the caller in the message.
        """
        # Lightning wraps optimizers, and keeps the original as an attribute.
        optimizer = getattr(optimizer, "optimizer", optimizer)
        for engine, own_optimizer in zip(self.engines, self._optimizers, strict=True):
            if is_same_optimizer(optimizer, own_optimizer):
                return engine
        raise ZeroEngineError(
            f"{call}: this {type(optimizer).__name__} belongs to no engine. Pass the optimizer that was set up "
            "together with the model."
        )

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for a plain ``backward()``, times the loss scale where there is one.

        Raises:
            ZeroEngineError: There are several engines, and any of them scales the loss.
        """
        if len(self.engines) == 1:
            return self.engines[0].scale(loss)
        if any(engine.config.scales_loss for engine in self.engines):
            raise ZeroEngineError(
                "backward() with several optimizers in fp16: each has a loss scale of its own, and one loss can have "
                'one scale. Write "bf16": {"enabled": true} instead of fp16.'
            )
        return loss

    def optimizer_of(self, engine: Engine) -> torch.optim.Optimizer:
        """Return the optimizer of an engine, for Lightning to wrap."""
        return self._optimizers[next(i for i, other in enumerate(self.engines) if other is engine)]

    def prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Declare that the backwards so far, or the next one, end a step of ``optimizer``."""
        self.find(optimizer, "optimizer.step()").set_gradient_accumulation_boundary(True)

    @contextlib.contextmanager
    def accumulating(self, engines: Sequence[Engine] | None = None) -> Iterator[None]:
        """Return a context whose backwards are not the last of a step."""
        engines = self.engines if engines is None else engines
        for engine in engines:
            engine.set_gradient_accumulation_boundary(False)
        yield
        # As under DDP, the next backward is the last one, unless it is in such a context as well. After an error there
        # may be no next one.
        for engine in engines:
            engine.set_gradient_accumulation_boundary(True)

    def close(self) -> None:
        """End all engines, and leave ordinary models. A collective."""
        engines, self.engines, self._optimizers = self.engines, [], []
        for engine in engines:
            engine.close()


def modules_of_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, nn.Module]:
    """Return the part of ``model`` that each of several optimizers trains, by the name of the module.

    Raises:
        ZeroEngineError: Two optimizers train parameters of one module.
    """
    parameter_sets = [{p for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    modules: dict[str, nn.Module] = {}
    for number, params in enumerate(parameter_sets):
        others = set().union(*parameter_sets[:number], *parameter_sets[number + 1 :])
        # Modules are listed from the outside inwards, so the last one that has all parameters is the smallest.
        *_, (name, module) = ((n, m) for n, m in model.named_modules() if params <= set(m.parameters()))
        if others & set(module.parameters()) or name in modules:
            raise ZeroEngineError(
                f"optimizers[{number}] ({type(optimizers[number]).__name__}) trains a part of the module "
                f"{name or 'LightningModule'!r} that another optimizer trains as well. zeroengine updates a module "
                "with one optimizer: give each optimizer a module of its own, such as self.generator and "
                "self.discriminator, or use one optimizer with several param groups."
            )
        modules[name] = module
    return modules


def broadcast_remaining(model: nn.Module, modules: Sequence[nn.Module], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank rank 0's values of the parameters and buffers of ``model`` outside of ``modules``."""
    partitioned = {tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor not in partitioned and not tensor.is_meta:
            run_collective(lambda sent: dist.broadcast(sent, src=0, group=group, async_op=True), tensor)
