"""The optimizer and the schedule that `ZeroAccelerator.prepare` returns."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from zeroengine.engine.engine import Engine
from zeroengine.errors import ZeroEngineError


class ZeroAcceleratedOptimizer(AcceleratedOptimizer):
    """An optimizer whose `step` is the engine's. It keeps the engine alive as long as the training loop has it.

    Args:
        engine: The engine.
        optimizer: The optimizer that was passed to `initialize`, or the one that the engine made.

    Attributes:
        engine: The engine.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        # Moving the optimizer's state, as device_placement does, would read a state that is partitioned.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine = engine
        # On a GPU, reading the outcome of every step makes the host wait for it. fp16 skips steps in normal training,
        # so there the schedule needs it, as with a GradScaler.
        self._reads_outcome = engine.config.scales_loss or engine.device.type == "cpu"
        self._is_overflow = False

    def step(self, closure: Any = None) -> None:
        """End the step of the engine where the micro-step in progress is the last one; otherwise do nothing.

        Raises:
            ZeroEngineError: There is a closure, or no backward came before.
        """
        if closure is not None:
            raise ZeroEngineError(
                "optimizer.step(closure): the engine has to see the backward before the step. Write "
                "accelerator.backward(loss) and then optimizer.step()."
            )
        if not self.gradient_state.sync_gradients:
            return
        skipped = self.engine.skipped_steps if self._reads_outcome else 0
        # A backward under accelerator.no_sync may have been the last one before the step.
        self.engine.set_gradient_accumulation_boundary(True)
        super().step()
        self._is_overflow = self._reads_outcome and self.engine.skipped_steps > skipped


class EngineOwnedSchedule:
    """What `prepare` returns for a `DummyScheduler`: the engine steps and saves the schedule of its configuration.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has stepped the schedule after the update."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each param group."""
        return [group["lr"] for group in self._engine.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine's checkpoint has the state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, as in `state_dict`."""
