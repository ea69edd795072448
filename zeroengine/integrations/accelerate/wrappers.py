"""The optimizer and the schedule that an accelerator on the engine returns from `prepare`."""

from __future__ import annotations

from collections.abc import Callable
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
        last_rates: The learning rates of the last update, by param group.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        # Moving the optimizer's state, as device_placement does, would read a state that is partitioned.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine = engine
        # On a GPU, reading the outcome of every step makes the host wait for it. fp16 skips steps in normal training,
        # so there the schedule needs it, as with a GradScaler.
        self._reads_outcome = engine.config.scales_loss or engine.device.type == "cpu"
        self._is_overflow = False
        self.last_rates = self.present_rates()

    def present_rates(self) -> list[float]:
        """Return the learning rates of the next update, by param group."""
        return [group["lr"] for group in self.param_groups]

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
        # The engine steps the schedule of its configuration after the update.
        self.last_rates = self.present_rates()
        # A backward under accelerator.no_sync may have been the last one before the step.
        if self.engine.config.manual_accumulation:
            self.engine.set_gradient_accumulation_boundary(True)
        super().step()
        self._is_overflow = self._reads_outcome and self.engine.skipped_steps > skipped


class EngineOwnedSchedule:
    """Stands for the schedule of the configuration, which the engine steps and saves.

    Args:
        rates: Returns the learning rates by param group: those of the next update, as schedules of torch do, or those
            of the last one, which a trainer logs.
    """

    def __init__(self, rates: Callable[[], list[float]]) -> None:
        self._rates = rates

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has stepped the schedule after the update."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each param group."""
        return self._rates()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine's checkpoint has the state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, as in `state_dict`."""
