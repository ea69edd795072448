"""The two ways to train: plain PyTorch, and the engine at one stage."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

import zeroengine
from tests.distributed.random_models.model import RandomModel
from tests.distributed.random_models.recipe import Recipe
from zeroengine.optim.mixed_optimizer import MixedOptimizer
from zeroengine.optim.muon import Muon


class ByNorms(torch.optim.Optimizer):
    """Divides each gradient by its parameter's norm of it, so that it needs whole parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros((), dtype=param.dtype))
                    mean.lerp_(param.grad.norm(), 0.5)
                    param.add_(param.grad / (mean + 0.1), alpha=-group["lr"])


def muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Muon for what is a matrix, and AdamW for the rest, if there are both."""
    matrices = [param for param in params if param.ndim >= 2 and param.requires_grad]
    rest = [param for param in params if param.ndim < 2 or not param.requires_grad]
    members: list[torch.optim.Optimizer] = []
    if matrices:
        members.append(Muon(matrices, lr=0.02, ns_dtype="fp32", eps=1e-2))
    if rest:
        members.append(torch.optim.AdamW(rest, lr=1e-2, eps=1e-3))
    return MixedOptimizer(members)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.01),
    # A large eps keeps elements of almost no gradient from magnifying the order of additions.
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, weight_decay=0.1),
    "adamw in groups": lambda params: torch.optim.AdamW(
        [{"params": params[::2]}, {"params": params[1::2], "lr": 2e-3, "weight_decay": 0.0}], lr=1e-2, eps=1e-3
    ),
    "muon": muon,
    "by norms": lambda params: ByNorms(params, lr=0.05),
}


class Trainer(Protocol):
    """The few calls by which the engine's loop and plain PyTorch's differ."""

    module: RandomModel
    scale: float  # of the losses whose backward is run

    def forward(self, *args: Any) -> Any: ...
    def backward(self, loss: torch.Tensor, by_engine: bool, **options: Any) -> None: ...
    def step(self) -> float:
        """Ends a step; the norm of its gradient before clipping."""
        ...

    def begin_micro_step(self, last: bool) -> None: ...
    def end_micro_step(self) -> None: ...
    def zero_grad(self) -> None: ...
    def gathered(self) -> contextlib.AbstractContextManager[None]: ...
    def no_sync(self) -> contextlib.AbstractContextManager[None]: ...
    def interrupted(self) -> contextlib.AbstractContextManager[None]:
        """Around a micro-step that raises: its gradients do not count."""
        ...


class Plain:
    """Plain PyTorch: one process on the data of all ranks."""

    def __init__(self, recipe: Recipe) -> None:
        self.module = RandomModel(recipe)
        self.optimizer = OPTIMIZERS[recipe.optimizer](list(self.module.parameters()))
        self.scale, self.clip = 1 / (recipe.ranks * recipe.micro_steps), recipe.clip

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: torch.Tensor, by_engine: bool, **options: Any) -> None:
        (loss * self.scale).backward(**options)

    def step(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip or math.inf).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def begin_micro_step(self, last: bool) -> None: ...

    def end_micro_step(self) -> None: ...

    def zero_grad(self) -> None: ...

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        yield

    no_sync = gathered

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        before = [None if param.grad is None else param.grad.clone() for param in self.module.parameters()]
        yield
        for param, grad in zip(self.module.parameters(), before, strict=True):
            param.grad = grad


# Who steps, and how accumulation ends: `engine.step()` after each micro-step, `optimizer.step()` once a step, or
# `engine.step()` once a step with manual accumulation, whose last backward is announced or not.
LOOPS = ("engine", "optimizer", "manual", "manual, announced")
OFFLOADS: dict[str, Callable[[int, str], dict[str, Any]]] = {  # by stage and folder
    "optimizer to cpu": lambda stage, folder: {"offload_optimizer": {"device": "cpu"}},
    "optimizer to disk": lambda stage, folder: {"offload_optimizer": {"device": "nvme", "nvme_path": folder}},
    "parameters to disk": lambda stage, folder: (
        {"offload_param": {"device": "nvme", "nvme_path": folder}} if stage == 3 else {}
    ),
}


class ByEngine:
    """The engine at one stage.

    Args:
        folder: for what is offloaded to disk.
    """

    def __init__(self, recipe: Recipe, stage: int, folder: str) -> None:
        self.module = RandomModel(recipe)
        self.recipe, self.stepped = recipe, False
        self.manual = recipe.loop.startswith("manual")
        self.scale = 1 / recipe.micro_steps if self.manual else 1.0
        zero = {"stage": stage, "param_persistence_threshold": 0} | dict(recipe.zero)
        if recipe.offload:
            zero |= OFFLOADS[recipe.offload](stage, folder)
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": "manual" if self.manual else recipe.micro_steps,
            "gradient_clipping": 0.0 if recipe.loop == "optimizer" else recipe.clip,
            "zero_optimization": zero,
            "comm": {"transport": recipe.transport, "timeout_seconds": 20},
        }
        if recipe.units:
            settings["units"] = list(recipe.units)
        self.optimizer = OPTIMIZERS[recipe.optimizer](list(self.module.parameters()))
        self.engine = zeroengine.initialize(self.module, self.optimizer, settings)

    def forward(self, *args: Any) -> Any:
        return self.engine(*args)

    def backward(self, loss: torch.Tensor, by_engine: bool, **options: Any) -> None:
        loss = loss * self.scale if self.manual else loss
        if by_engine:
            self.engine.backward(loss, **options)
        else:
            loss.backward(**options)

    def step(self) -> float:
        if self.recipe.loop == "optimizer":
            norm = self.engine.clip_grad_norm_(self.recipe.clip or math.inf)
            self.optimizer.step()
            self.optimizer.zero_grad()
            assert norm.item() == self.engine.grad_norm
        elif self.recipe.loop == "manual":
            self.stepped = bool(self.engine.step())
        assert self.stepped or self.recipe.loop == "optimizer"
        assert self.engine.skipped_steps == 0, "a gradient is not finite"
        assert self.engine.grad_norm is not None
        return self.engine.grad_norm

    def begin_micro_step(self, last: bool) -> None:
        if self.recipe.loop == "manual, announced":
            self.engine.set_gradient_accumulation_boundary(last)

    def end_micro_step(self) -> None:
        if self.recipe.loop in ("engine", "manual, announced"):
            self.stepped = bool(self.engine.step())

    def zero_grad(self) -> None:
        if self.recipe.loop == "optimizer":
            self.optimizer.zero_grad()
        else:
            self.engine.zero_grad()

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        return zeroengine.gathered(self.module)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.engine.no_sync()

    def interrupted(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
