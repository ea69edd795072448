"""``Trainer(strategy="zeroengine")``: a strategy whose model is partitioned by an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from zeroengine.config import Config, ConfigLike
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
from zeroengine.integrations.lightning.engine_group import (
    EngineGroup,
    broadcast_remaining,
    modules_of_optimizers,
)
from zeroengine.integrations.lightning.trainer_precision import ZeroPrecision
from zeroengine.integrations.parameter_engines import engines_of

# What the engine's checkpoint holds instead, and therefore no dict of Lightning.
KEPT_BY_ENGINE = ("state_dict", "optimizer_states")


class ZeroStrategy(DDPStrategy):
    """Trains a LightningModule partitioned over the ranks, at the stage and precision of a configuration.

    Ranks are started, and data is divided among them, as under Lightning's DDP. Each optimizer has an engine:
    ``zeroengine.engine_of(model)`` returns it. It stays after ``fit``, so that ``trainer.save_checkpoint`` works, until
    the next ``fit``, ``validate``, ``test`` or ``predict``, or until ``engine.release()``.

    Args:
        config: What ``zeroengine.initialize`` takes. None: the file of zero-launch, or the defaults if there is none.
        stage: The stage, which the configuration must have if there is one.
        options: Further arguments of Lightning's ``DDPStrategy``, such as ``process_group_backend`` and ``timeout``.

    Raises:
        ZeroEngineError: The configuration is wrong, or contradicts ``stage``.
    """

    # Properties of the base class.
    model: Any
    optimizers: Any

    def __init__(self, config: ConfigLike | None = None, *, stage: int | None = None, **options: Any) -> None:
        # The base class assigns to precision_plugin, which compares it with the configuration.
        self._settings: Config = load_settings(config, stage)
        self._engine_group = EngineGroup()
        self._engines_by_name: dict[str, Engine] = {}
        # What lightning_module_state_dict returns until the weights are needed. See save_checkpoint.
        self._state_dict_of_engine: dict[str, Any] = {}
        super().__init__(**options)
        check_no_arguments_of_ddp(self)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The arguments of the samplers that Lightning makes: ranks that share samples get the same."""
        sharing = self._settings.ranks_per_sample
        return {"num_replicas": self.world_size // sharing, "rank": self.global_rank // sharing}

    @property
    def precision_plugin(self) -> Precision:
        """The plugin that gives the Trainer's calls to the engines."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # The Trainer makes the plugin that its precision= names. It is compared with the configuration, and replaced.
        if plugin is not None and not isinstance(plugin, ZeroPrecision):
            self._settings = with_precision(self._settings, str(plugin.precision), "Trainer")
            plugin = ZeroPrecision(self._engine_group, precision_of(self._settings))
        self._precision_plugin = plugin

    # -- setup ------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are loaded after ``setup``: the engine reads them."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning loads the optimizers: the engine does."""
        return False

    def setup(self, trainer: Trainer) -> None:
        """Move the model to its device, make the optimizers, and partition both."""
        model = self.lightning_module
        assert self.accelerator is not None and model is not None
        self._end_engines()
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._check_trainer(trainer)
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        # Parameters of meta_init have no memory yet: initialize puts them on the device.
        if any(param.is_meta for param in model.parameters()):
            _update_properties(model, device=self.root_device)
        else:
            self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
            self._make_training_engines(trainer)
        elif any(True for _ in model.parameters()):
            self._add_engine("model", make_evaluation_engine(model, self._settings, KEYS_OF_TRAINED_MODEL))
        self.setup_precision_plugin()

    def _check_trainer(self, trainer: Trainer) -> None:
        """Refuse what would train something else.

        Raises:
            ZeroEngineError: The Trainer has a callback or a plugin that does not work with the configuration.
        """
        if self._checkpoint_io is not None and type(self._checkpoint_io) is not TorchCheckpointIO:
            raise ZeroEngineError(
                f"plugins=[{type(self._checkpoint_io).__name__}()]: the engine writes the checkpoints, each rank its "
                'own part. Leave the plugin out; to save beside training, write "checkpoint": {"async_save": true} in '
                "the configuration."
            )
        for callback in trainer.callbacks:
            if not isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
                continue
            name, stage = type(callback).__name__, self._settings.zero_optimization.stage
            if stage in (3, "auto"):
                raise ZeroEngineError(
                    f"{name} reads whole parameters on every rank, and zero_optimization.stage is {stage!r}. Use "
                    "stage 0, 1 or 2, or keep the average in the optimizer, as docs/averages.md shows."
                )
            if isinstance(callback, WeightAveraging) and precision_of(self._settings) != "32-true":
                raise ZeroEngineError(
                    f"{name} would round its averages to the precision of the model at each validation. Train in fp32, "
                    "or keep the average of the fp32 weights in the optimizer, as docs/averages.md shows."
                )

    def _make_training_engines(self, trainer: Trainer) -> None:
        settings, model = self._settings, self.lightning_module
        assert model is not None
        steps, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
        if clip and settings.gradient_clipping and clip != settings.gradient_clipping:
            raise ZeroEngineError(
                f"Trainer(gradient_clip_val={clip}), and gradient_clipping is {settings.gradient_clipping} in the "
                "configuration. Write one of them."
            )
        count = f"the Trainer has Trainer(accumulate_grad_batches={steps})"
        settings = with_accumulation_of_loop(settings, steps, self.world_size, count)
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in self.optimizers]
        # configure_optimizers returned None: the configuration names the optimizer.
        if isinstance(optimizers[0], _MockOptimizer):
            if settings.optimizer is None:
                raise ZeroEngineError(
                    "configure_optimizers() returned None, and the configuration names no optimizer. Return one, or "
                    'write such as "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}.'
                )
            engine = self._add_engine("model", initialize(model, None, settings))
            self.optimizers = [engine.optimizer]
            return
        if settings.scheduler is not None and self.lr_scheduler_configs:
            raise ZeroEngineError(
                "configure_optimizers() returns a schedule, and the configuration has one as well. Remove one of them."
            )
        modules: dict[str, torch.nn.Module] = {"model": model}
        if len(optimizers) > 1:
            modules = modules_of_optimizers(model, optimizers)
            broadcast_remaining(model, list(modules.values()))
        for (name, module), optimizer in zip(modules.items(), optimizers, strict=True):
            self._add_engine(name, initialize(module, optimizer, settings), optimizer)
        self.optimizers = [self._engine_group.optimizer_of(engine) for engine in self._engine_group.engines]

    def _add_engine(self, name: str, engine: Engine, optimizer: torch.optim.Optimizer | None = None) -> Engine:
        self._engine_group.add(engine, optimizer)
        self._engines_by_name[name] = engine
        return engine

    def _end_engines(self) -> None:
        """End the engines of earlier runs of this model, and of this strategy. A collective."""
        assert self.lightning_module is not None
        self._engine_group.close()
        self._engines_by_name = {}
        # Another Trainer may have trained the model before.
        for earlier in engines_of(self.lightning_module.parameters()):
            earlier.close()

    def teardown(self) -> None:
        """End the run. The engines stay, for ``trainer.save_checkpoint`` after ``fit``."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- steps ------------------------------------------------------------------------------------

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run the module's method of this name as the forward of the engine."""
        model, engines = self.lightning_module, self._engine_group.engines
        # With several engines each one's module is called inside the step. Its hooks do the same.
        if len(engines) == 1 and engines[0].module is model:
            return self._forward_redirection(engines[0], model, name, *args, **kwargs)
        return getattr(model, name)(*args, **kwargs)

    training_step = partialmethod(_run_step, "training_step")
    validation_step = partialmethod(_run_step, "validation_step")
    test_step = partialmethod(_run_step, "test_step")
    predict_step = partialmethod(_run_step, "predict_step")

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the closure and take a step."""
        # The backward of the closure is the last one of the step, so its gradients are reduced while it computes.
        self._engine_group.prepare_step(optimizer)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context whose backwards are not the last of a step."""
        with self._engine_group.accumulating():
            yield

    # -- checkpoints ------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return an empty dict where the engine saves the weights, and else the module's ``state_dict``."""
        if self._engine_group.engines:
            self._state_dict_of_engine = {}
            return self._state_dict_of_engine
        state_dict: dict[str, Any] = super().lightning_module_state_dict()
        return state_dict

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an empty dict: the engine saves the optimizer's state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the run as a folder; or the weights alone, as one file of Lightning, with ``weights_only=True``.

        Args:
            checkpoint: The Trainer's state.
            filepath: The folder, or the file.
            storage_options: Must be None.

        Raises:
            ZeroEngineError: The path or the arguments cannot be used, or a hook changed the ``state_dict``.
        """
        filepath = self.broadcast(filepath)
        if storage_options is not None:
            raise ZeroEngineError(
                "save_checkpoint(storage_options=...): checkpoints are folders on a disk; leave it out"
            )
        if not self._engine_group.engines:
            raise ZeroEngineError(
                "save_checkpoint() without an engine: it was released, or there was no fit(). Save the model itself: "
                "torch.save(model.state_dict(), path)."
            )
        is_of_engine = checkpoint.get("state_dict") is self._state_dict_of_engine
        weights_moved = checkpoint.get("current_model_state") is self._state_dict_of_engine
        if (not is_of_engine and not weights_moved) or self._state_dict_of_engine:
            raise ZeroEngineError(
                'on_save_checkpoint() changed checkpoint["state_dict"], which is empty here: the engine saves the '
                "weights. Remove that from the hook; engine.save_weights(folder, names=...) saves some of them."
            )
        if "optimizer_states" not in checkpoint:
            self._save_weights_file(checkpoint, filepath)
            return
        state = {key: value for key, value in checkpoint.items() if key not in KEPT_BY_ENGINE}
        if weights_moved:
            # WeightAveraging puts its average there.
            state["state_dict"] = checkpoint["state_dict"]
        save_engines(self._engines_by_name, checked_folder(filepath, "save_checkpoint()"), state)

    def _save_weights_file(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        assert self.lightning_module is not None
        if len(self._engine_group.engines) == 1:
            state_dict = self._engine_group.engines[0].full_state_dict(rank0_only=True)
        else:
            # Parts outside of the engines are ordinary, and the engines' parts are replaced by their whole values.
            state_dict = dict(self.lightning_module.state_dict())
            for name, engine in self._engines_by_name.items():
                whole = engine.full_state_dict(rank0_only=True)
                state_dict.update({f"{name}.{key}": value for key, value in whole.items()})
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint({**checkpoint, "state_dict": state_dict}, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder into the engines, or read a file that Lightning wrote; return the Trainer's state.

        Raises:
            ZeroEngineError: A file is to be resumed from, or the callbacks cannot resume.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
            raise ZeroEngineError(
                "fit(ckpt_path=...) with StochasticWeightAveraging: its schedule can only be restored before the "
                "engine exists. Train without interruption, or use WeightAveraging, which resumes."
            )
        if not is_engine_checkpoint(checkpoint_path):
            if fitting:
                raise ZeroEngineError(
                    f"fit(ckpt_path={str(checkpoint_path)!r}): this file has the optimizer's state as another strategy "
                    "keeps it. To start from its weights, load them before: model.load_state_dict(torch.load(path, "
                    'weights_only=True)["state_dict"]), and leave ckpt_path out. zeroengine resumes from its own '
                    "checkpoints, which are folders."
                )
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return loaded
        client_states = load_engines(
            self._engines_by_name,
            Path(checkpoint_path),
            weights_only=dict.fromkeys(self._engines_by_name, not fitting),
            strict=self.lightning_module.strict_loading,
        )
        state = lightning_state(client_states[0], checkpoint_path, weights_only)
        if "current_model_state" in state:
            # WeightAveraging loads this into the model, which has these values already.
            state["current_model_state"] = self.lightning_module.state_dict()
        return {"state_dict": {}, **state}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a file that Lightning wrote. Those of a folder are loaded already."""
        # Every checkpoint of Lightning's own has weights, and what load_checkpoint returns for a folder has none, or
        # those of an average.
        if checkpoint["state_dict"] and "averaging_state" not in checkpoint:
            (engine,) = self._engine_group.engines
            engine.load_weights(dict(checkpoint["state_dict"]), strict=strict)
