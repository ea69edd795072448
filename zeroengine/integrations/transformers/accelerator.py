"""The Accelerator that a trainer of transformers works with: it prepares a model by making an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from zeroengine.config import Config
from zeroengine.engine.engine import Engine
from zeroengine.engine.initialize import engine_of, initialize
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.accelerate.wrappers import ZeroAcceleratedOptimizer
from zeroengine.integrations.transformers.settings import config_of_evaluation, config_of_frozen_model


def _make_trainable(params: list[nn.Parameter]) -> None:
    for param in params:
        param.requires_grad_()


class TrainerAccelerator(Accelerator):
    """An Accelerator that partitions the models that it prepares.

    Args:
        arguments: The arguments of `Accelerator`.

    Attributes:
        zero_config: The configuration of the next engine.
        engine: The engine of the model that is trained; None before `prepare`.
    """

    def __init__(self, zero_config: Config, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.zero_config = zero_config
        self.engine: Engine | None = None
        # The engine of a model that is evaluated before it is trained, and the parameters that training needs.
        self._evaluation: tuple[Engine, list[nn.Parameter]] | None = None
        # Engines of frozen models, such as a reference model. The models may outlive this object.
        self._frozen_engines: list[Engine] = []

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Make an engine of a model and its optimizer; prepare data loaders as usual."""
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
        if not models:
            return super().prepare(*args, device_placement=device_placement)
        if len(models) > 1 or len(optimizers) > 1:
            raise ZeroEngineError(
                f"prepare() was given {len(models)} models and {len(optimizers)} optimizers; prepare one model with "
                "its optimizer at a time"
            )
        if not optimizers:
            return super().prepare(*args, device_placement=device_placement)
        model, optimizer = models[0], optimizers[0]
        engine = self._training_engine(model, optimizer)
        if not isinstance(optimizer, ZeroAcceleratedOptimizer) or optimizer.engine is not engine:
            optimizer = ZeroAcceleratedOptimizer(engine, getattr(optimizer, "optimizer", optimizer))
        optimizer._is_accelerate_prepared = True
        self._optimizers.append(optimizer)
        prepared = {models[0]: self._without_wrapping(model)}
        return tuple(
            optimizer if arg is optimizers[0] else prepared.get(arg, arg) if isinstance(arg, nn.Module) else arg
            for arg in args
        )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Partition a model that is evaluated alone, such as a reference or a reward model. It is frozen for good."""
        if not evaluation_mode:
            raise ZeroEngineError(
                "prepare_model() of a model that is trained: pass it to prepare() with its optimizer. For a model that "
                "is evaluated alone write evaluation_mode=True."
            )
        if engine_of(model) is None:
            model.requires_grad_(False)
            self._frozen_engines.append(initialize(model, None, config_of_frozen_model(self.zero_config)))
        return self._without_wrapping(model)

    def _without_wrapping(self, model: nn.Module) -> nn.Module:
        """Let accelerate note and compile a model that an engine has, and return it."""
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def prepare_evaluation(self, model: nn.Module) -> None:
        """Partition a model that is evaluated before it is trained, until `end_evaluation`."""
        if engine_of(model) is not None:
            return
        trainable = [param for param in model.parameters() if param.requires_grad]
        model.requires_grad_(False)
        try:
            self._evaluation = initialize(model, None, config_of_evaluation(self.zero_config)), trainable
        except BaseException:
            _make_trainable(trainable)
            raise
        # The trainer prepares the model itself if there is none here.
        self._models.append(model)

    def end_evaluation(self) -> None:
        """Make a model that was evaluated an ordinary one, which an optimizer can be built for."""
        if self._evaluation is not None:
            (engine, trainable), self._evaluation = self._evaluation, None
            engine.release()
            _make_trainable(trainable)

    def close_engine(self) -> None:
        """End the engine of a model that is replaced by another one."""
        self.end_evaluation()
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def end_training(self) -> None:
        """End all engines, then the trackers and the process group."""
        for engine in (self.engine, *(self._evaluation or ())[:1], *self._frozen_engines):
            if engine is not None:
                engine.close()
        self.engine = self._evaluation = None
        self._frozen_engines.clear()
        super().end_training()

    def _training_engine(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
        """Return the engine that trains `model`. A second call of `train` goes on with the engine of the first."""
        module = self.unwrap_model(model, keep_torch_compile=False)
        present = engine_of(module)
        if present is None or present is not self.engine:
            if present is not None:
                # Another trainer has trained this model, with an optimizer of its own.
                present.release()
            self.engine = initialize(module, optimizer, self.zero_config)
        # An earlier run of the loop may have ended in the middle of a step.
        self.engine.zero_grad()
        return self.engine

    def _require_engine(self, call: str) -> Engine:
        if self.engine is None:
            raise ZeroEngineError(f"{call} before prepare(): no model is trained yet")
        return self.engine

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients, and reduce them where this backward ends the step."""
        engine = self._require_engine("backward()")
        if engine.config.manual_accumulation:
            engine.set_gradient_accumulation_boundary(self.sync_gradients)
        engine.backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Return a context without effect: the engine learns in `backward` which gradients are the last of a step."""
        yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the gradient of the step, and return its global norm before clipping."""
        if norm_type != 2:
            raise ZeroEngineError(f"clip_grad_norm_(): the engine computes the 2-norm, found norm_type={norm_type}")
        return self._require_engine("clip_grad_norm_()").clip_grad_norm_(max_norm or math.inf)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return the whole model's state dict, on the CPU of rank 0. Call it on every rank."""
        engine = engine_of(model)
        if engine is None:
            state_dict: dict[str, torch.Tensor] = super().get_state_dict(model, unwrap)
            return state_dict
        return engine.full_state_dict(rank0_only=True)
