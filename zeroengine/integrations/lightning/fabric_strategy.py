"""``Fabric(strategy="zeroengine")``: a strategy whose models are partitioned by engines."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _Stateful
from torch import nn

from zeroengine.config import Config, ConfigLike
from zeroengine.deferred_init.meta_init import meta_init
from zeroengine.engine.engine import Engine
from zeroengine.engine.initialize import initialize
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.evaluation import KEYS_OF_TRAINED_MODEL, make_evaluation_engine
from zeroengine.integrations.lightning.checkpoints import (
    checked_folder,
    is_engine_checkpoint,
    lightning_state,
    load_engines,
    save_engines,
)
from zeroengine.integrations.lightning.configuration import (
    check_no_arguments_of_ddp,
    load_settings,
    precision_of,
    with_accumulation_of_loop,
    with_precision,
)
from zeroengine.integrations.lightning.engine_group import EngineGroup, is_same_optimizer

# What fabric.save and fabric.load are given.
FabricState = dict[str, Any]


class PartitionedModule(nn.Module):
    """A model whose forward is that of its engine.

    Args:
        module: The model.
        make_engine: Makes the engine of the model and an optimizer, or of the model alone for None.

    Attributes:
        module: The model.
    """

    def __init__(self, module: nn.Module, make_engine: Callable[..., Engine]) -> None:
        super().__init__()
        self.module = module
        self._make_engine = make_engine
        self._engine: Engine | None = None

    def set_up(self, optimizer: torch.optim.Optimizer | None) -> Engine:
        """Make the engine. A collective."""
        self._engine = self._make_engine(self.module, optimizer)
        return self._engine

    @property
    def engine(self) -> Engine:
        """The engine. A model that got no optimizer before its first use is evaluated, and gets one without."""
        return self.set_up(None) if self._engine is None else self._engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        return self.engine(*args, **kwargs)


class ScaledPrecision(Precision):
    """Scales the loss in ``fabric.backward``, in fp16. Fabric then refuses ``loss.backward()``."""

    def __init__(self, engines: EngineGroup) -> None:
        self._engines = engines

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward of the scaled loss, for the engine of ``model`` if that is given."""
        scale = model.engine.scale if isinstance(model, PartitionedModule) else self._engines.scaled
        scale(tensor).backward(*args, **kwargs)


class AccumulationControl(_BackwardSyncControl):
    """``fabric.no_backward_sync``: the backwards inside are not the last of a step."""

    def __init__(self, engines: EngineGroup) -> None:
        self._engines = engines

    @contextlib.contextmanager
    def no_backward_sync(self, module: PartitionedModule, enabled: bool) -> Iterator[None]:
        """Return a context for a forward and a backward.

        Args:
            module: The model that was set up.
            enabled: Whether further backwards of this step follow.
        """
        if not enabled:
            module.engine.set_gradient_accumulation_boundary(True)
        with self._engines.accumulating([module.engine] if enabled else []):
            yield


class ZeroFabricStrategy(DDPStrategy):
    """Trains models partitioned over the ranks, at the stage and precision of a configuration.

    Ranks are started, and data is divided among them, as under Lightning's DDP. Each model that ``fabric.setup`` is
    given has an engine, which ``zeroengine.engine_of(model)`` returns. The loop ends the steps, with
    ``optimizer.step()``.

    Args:
        config: What ``zeroengine.initialize`` takes. None: the file of zero-launch, or the defaults if there is none.
        stage: The stage, which the configuration must have if there is one.
        options: Further arguments of Lightning's ``DDPStrategy``, such as ``process_group_backend`` and ``timeout``.

    Raises:
        ZeroEngineError: The configuration is wrong, or contradicts ``stage``.
    """

    def __init__(self, config: ConfigLike | None = None, *, stage: int | None = None, **options: Any) -> None:
        # The base class assigns to precision, which compares it with the configuration.
        self._settings: Config = load_settings(config, stage)
        self._engine_group = EngineGroup()
        self._waiting: list[PartitionedModule] = []
        super().__init__(**options)
        self._backward_sync_control = AccumulationControl(self._engine_group)
        check_no_arguments_of_ddp(self)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The arguments of the samplers that Lightning makes: ranks that share samples get the same."""
        sharing = self._settings.ranks_per_sample
        return {"num_replicas": self.world_size // sharing, "rank": self.global_rank // sharing}

    @property
    def precision(self) -> Precision:
        """The plugin that scales the loss where the configuration has fp16."""
        return self._precision if self._precision is not None else Precision()

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        # Fabric makes the plugin that its precision= names. It is compared with the configuration, and replaced.
        if precision is not None and not isinstance(precision, ScaledPrecision):
            self._settings = with_precision(self._settings, str(precision.precision), "Fabric")
            precision = ScaledPrecision(self._engine_group) if self._settings.scales_loss else Precision()
            precision.precision = precision_of(self._settings)
        self._precision = precision

    # -- setup ------------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> Any:
        """Return a context in which a model is built: at stage 3 without memory, unless ``empty_init`` is False."""
        if self._settings.zero_optimization.stage in (3, "auto") and empty_init is not False:
            return meta_init(values=not empty_init)
        return super().module_init_context(empty_init)

    def module_to_device(self, module: nn.Module) -> None:
        """Move a model to this rank's device. Parameters of ``meta_init`` have no memory yet."""
        if not any(param.is_meta for param in module.parameters()):
            super().module_to_device(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Partition a model and its optimizer. A schedule stays the loop's.

        Raises:
            ZeroEngineError: There are several optimizers.
        """
        if len(optimizers) != 1:
            raise ZeroEngineError(
                f"fabric.setup() with {len(optimizers)} optimizers: zeroengine updates a model with one. Set up each "
                "part with its own, such as generator, g_optimizer = fabric.setup(generator, g_optimizer), or use one "
                "optimizer with several param groups."
            )
        partitioned = PartitionedModule(module, self._make_engine)
        engine = partitioned.set_up(optimizers[0])
        return partitioned, [self._engine_group.optimizer_of(engine)], scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Take a model, whose engine is made when its optimizer is set up, or at its first forward without one."""
        partitioned = PartitionedModule(module, self._make_engine)
        self._waiting.append(partitioned)
        return partitioned

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Partition the model that ``optimizer`` trains, which ``setup_module`` took.

        Raises:
            ZeroEngineError: No such model waits for its optimizer.
        """
        params = {param for group in optimizer.param_groups for param in group["params"]}
        for partitioned in self._waiting:
            if partitioned._engine is None and params & set(partitioned.parameters()):
                self._waiting.remove(partitioned)
                return self._engine_group.optimizer_of(partitioned.set_up(optimizer))
        raise ZeroEngineError(
            f"fabric.setup_optimizers(): no model that fabric.setup_module() took waits for this "
            f"{type(optimizer).__name__}. Set up the model first and once, before its first forward, and build the "
            "optimizer from its parameters."
        )

    def _make_engine(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Engine:
        count = "the loop under Fabric counts by itself"
        settings = with_accumulation_of_loop(self._settings, 1, self.world_size, count)
        if optimizer is not None and settings.scheduler is not None:
            raise ZeroEngineError(
                "the configuration has a scheduler, which the engine would step beside one of the loop. Remove the "
                "section, and make the schedule from the optimizer: the loop steps it."
            )
        if optimizer is None:
            engine = make_evaluation_engine(module, settings, KEYS_OF_TRAINED_MODEL)
        else:
            engine = initialize(module, optimizer, settings)
        self._engine_group.add(engine, optimizer)
        return engine

    # -- steps ------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Run the closure, if there is one, and take a step."""
        self._engine_group.prepare_step(optimizer)
        closure = kwargs.pop("closure", None)
        # An optimizer of an engine calls no closure: the engine must see its backward before the step.
        result = closure() if closure is not None else None
        optimizer.step(**kwargs)
        return result

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip the gradient of this step, and return its norm before that.

        Raises:
            ZeroEngineError: ``norm_type`` is not 2, or the norm is not finite, which in fp16 may be.
        """
        if norm_type != 2:
            raise ZeroEngineError(
                f"fabric.clip_gradients(norm_type={norm_type}): the engine clips the 2-norm. Leave it out."
            )
        engine = self._engine_group.find(optimizer, "fabric.clip_gradients()")
        norm = engine.clip_grad_norm_(max_norm)
        # In fp16 the engine skips such a step and lowers the scale.
        if error_if_nonfinite and not engine.config.scales_loss and not math.isfinite(float(norm)):
            raise ZeroEngineError(
                f"fabric.clip_gradients(): the norm of the gradient is {float(norm)}. Look for the cause, such as the "
                "learning rate; or pass error_if_nonfinite=False, and the step is skipped."
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Refuse to clip values.

        Raises:
            ZeroEngineError: Always.
        """
        raise ZeroEngineError(
            "fabric.clip_gradients(clip_val=...): the engine clips the norm. Write max_norm=... instead."
        )

    # -- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: FabricState, storage_options: Any = None, filter: dict[str, Any] | None = None
    ) -> None:
        """Save the models in ``state`` with their optimizers, and what else is in it.

        Args:
            path: A folder; a file if ``state`` has no model.
            state: Models that were set up, their optimizers, and other objects.
            storage_options: Must be None where there is a model.
            filter: Chooses the items of other dicts. Models are saved as a whole.

        Raises:
            ZeroEngineError: The arguments cannot be used.
        """
        modules = _modules_in(state)
        if not modules:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        path = self.broadcast(path)
        if storage_options is not None or (filter and modules.keys() & filter.keys()):
            raise ZeroEngineError(
                "fabric.save(): the engine saves whole models in folders on a disk, so storage_options, and filter of "
                "a model, have no effect. Leave them out; engine.save_weights(folder, names=...) saves some parameters."
            )
        optimizers = [self._engine_group.optimizer_of(module.engine) for module in modules.values()]
        others = {
            key: value for key, value in state.items() if key not in modules and not _is_any_of(value, optimizers)
        }
        extra = self._convert_stateful_objects_in_state(others, filter=filter or {})
        engines = {key: module.engine for key, module in modules.items()}
        save_engines(engines, checked_folder(path, "fabric.save()"), extra)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder that ``save_checkpoint`` wrote, or a file that Lightning or torch wrote.

        Args:
            path: The folder or the file.
            state: What to load into: a dict of models, optimizers and other objects; or, of a file, one model.
            strict: Whether all names of ``state``, and of the models, must be there.
            weights_only: As of ``torch.load``, for what is no model.

        Returns:
            What was saved and is not in ``state``.

        Raises:
            ZeroEngineError: The folder is read without a model, or an optimizer's state is in a file.
        """
        path = self.broadcast(path)
        if isinstance(state, PartitionedModule) and not is_engine_checkpoint(path):
            state.engine.load_weights(
                self.checkpoint_io.load_checkpoint(path, weights_only=weights_only), strict=strict
            )
            return {}
        modules = _modules_in(state) if isinstance(state, dict) else {}
        if is_engine_checkpoint(path) and not modules:
            raise ZeroEngineError(
                f"fabric.load({str(path)!r}): the folder has a model. Pass the model that was set up, such as "
                'fabric.load(path, {"model": model, "optimizer": optimizer}).'
            )
        if not modules:
            remaining: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return remaining
        optimizers = {key: self._engine_group.optimizer_of(module.engine) for key, module in modules.items()}
        given = {
            key: any(_is_any_of(value, [optimizer]) for value in state.values())
            for key, optimizer in optimizers.items()
        }
        if is_engine_checkpoint(path):
            engines = {key: module.engine for key, module in modules.items()}
            without = {key: not is_given for key, is_given in given.items()}
            client_states = load_engines(engines, Path(path), weights_only=without, strict=strict)
            saved = next((lightning_state(client, path, weights_only) for client in client_states if client), {})
        else:
            if any(given.values()):
                raise ZeroEngineError(
                    f"fabric.load({str(path)!r}): this file has the optimizer's state as another strategy keeps it. "
                    "Load the model alone: leave the optimizer out of the state."
                )
            saved = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            for key, module in modules.items():
                module.engine.load_weights(saved.pop(key), strict=strict)
        others = {
            key
            for key, value in state.items()
            if key not in modules and not _is_any_of(value, list(optimizers.values()))
        }
        _validate_keys_for_strict_loading(others, saved.keys(), strict=strict)
        for key in others & saved.keys():
            if isinstance(state[key], _Stateful):
                state[key].load_state_dict(saved.pop(key))
            else:
                state[key] = saved.pop(key)
        return saved


def _modules_in(state: FabricState) -> dict[str, PartitionedModule]:
    return {key: value for key, value in state.items() if isinstance(value, PartitionedModule)}


def _is_any_of(value: object, optimizers: list[torch.optim.Optimizer]) -> bool:
    return any(is_same_optimizer(value, other) for other in optimizers)
