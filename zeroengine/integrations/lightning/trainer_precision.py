"""The precision plugin of ``ZeroStrategy``: the engine casts and scales, and clips."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision

from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.lightning.engine_group import EngineGroup


class ZeroPrecision(Precision):
    """Backward, clipping and optimizer steps of a Trainer, on the engines of a strategy.

    Args:
        engines: The engines.
        precision: Lightning's name of the precision that the configuration has.
    """

    def __init__(self, engines: EngineGroup, precision: str) -> None:
        super().__init__()
        self.precision = precision
        self._engines = engines
        # Whether there was a backward since the last step. Without one, a step has nothing to update with.
        self._has_gradients = False

    def backward(self, tensor: torch.Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run the module's ``backward`` with the loss times the loss scale."""
        super().backward(self._engines.scaled(tensor), model, optimizer, *args, **kwargs)
        self._has_gradients = True

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, the hooks before a step and clipping, and take the engine's step."""
        result = closure()
        # A training_step that returned None computed no gradients. If no earlier micro-step did, there is no step.
        if not self._has_gradients:
            return result
        self._after_closure(model, optimizer)
        optimizer.step(**kwargs)
        self._has_gradients = False
        return result

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip the gradient of this step to a norm."""
        self._engines.find(optimizer, "clip_gradients()").clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Refuse to clip values.

        Raises:
            ZeroEngineError: Always.
        """
        raise ZeroEngineError(
            'gradient_clip_algorithm="value": the engine clips the norm. Write gradient_clip_algorithm="norm", or '
            "leave it out."
        )

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Return a context that does nothing: the engine casts, or enters autocast, where the model begins."""
        yield
