"""The Accelerator that a trainer of transformers works with: it prepares a model by making an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from torch import nn

from zeroengine.config import Config
from zeroengine.engine.engine import Engine
from zeroengine.engine.initialize import engine_of
from zeroengine.integrations.accelerate import ZeroAccelerator
from zeroengine.integrations.accelerate.settings import precision_of
from zeroengine.integrations.evaluation import trainable_parameters


class TrainerAccelerator(ZeroAccelerator):
    """A `ZeroAccelerator` whose configuration the trainer has completed, and which has one engine that trains.

    Args:
        zero_config: The configuration of the next engine.
        arguments: The arguments of `Accelerator`.

    Attributes:
        zero_config: The configuration of the next engine.
        engine: The engine of the model that is trained; None before `prepare`.
    """

    # The trainer asks for the precision that it has named itself, and the engine enters autocast where a model begins.
    mixed_precision = Accelerator.mixed_precision
    autocast = Accelerator.autocast
    # The trainer cuts batches where it takes them.
    cut_batches = staticmethod(lambda loader: loader)

    def __init__(self, zero_config: Config, **arguments: Any) -> None:
        super().__init__(zero_config, **{**arguments, "mixed_precision": precision_of(zero_config)})
        self.engine: Engine | None = None
        # The engine of a model that is evaluated before it is trained, and the parameters that training needs.
        self._evaluation: tuple[Engine, list[nn.Parameter]] | None = None

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Make an engine of a model and its optimizer; prepare data loaders as usual."""
        prepared = super().prepare(*args, device_placement=device_placement)
        for optimizer in self._optimizers:
            self.engine = optimizer.engine
        if any(isinstance(arg, nn.Module) for arg in args) and self.engine is not None:
            # An earlier run of the loop may have ended in the middle of a step.
            self.engine.zero_grad()
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Partition a model. One that is evaluated alone, such as a reference or a reward model, is frozen for good."""
        if evaluation_mode and engine_of(model) is None:
            model.requires_grad_(False)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_evaluation(self, model: nn.Module) -> None:
        """Partition a model that is evaluated before it is trained, until `end_evaluation`."""
        if engine_of(model) is None:
            super().prepare_model(model, evaluation_mode=True)
            self._evaluation = self._evaluation_engines[-1], trainable_parameters(model)
            model.requires_grad_(False)

    def end_evaluation(self) -> None:
        """Make a model that was evaluated an ordinary one, which an optimizer can be built for."""
        if self._evaluation is not None:
            (engine, trainable), self._evaluation = self._evaluation, None
            self._evaluation_engines.remove(engine)
            engine.release()
            for param in trainable:
                param.requires_grad_()

    def close_engine(self) -> None:
        """End the engine of a model that is replaced by another one."""
        self.end_evaluation()
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _training_engines(self) -> list[Engine]:
        return [] if self.engine is None else [self.engine]

    def _config_of_engine(self, values: Mapping[str, Any]) -> Config:
        # The trainer has made the optimizer of the configuration.
        return self.zero_config.without_optimizer()

    def _check_has_no_optimizer(self, model: nn.Module) -> None:
        """Release an engine of another trainer, or of an earlier optimizer of this one."""
        engine = engine_of(model)
        if engine is not None:
            engine.release()

    def _convert_outputs(self, engine: Engine) -> None:
        """Leave outputs in the dtype of autocast: logits in fp32 would take twice the memory."""
