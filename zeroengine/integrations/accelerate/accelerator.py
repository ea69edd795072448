"""`ZeroAccelerator`: accelerate's `Accelerator` on the engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from accelerate.utils.operations import convert_to_fp32
from torch import nn
from torch.utils.data import DataLoader

from zeroengine.comm.launched_ranks import has_peers, join_launched_ranks
from zeroengine.config import Config, ConfigLike, load
from zeroengine.engine.engine import Engine
from zeroengine.engine.initialize import engine_of
from zeroengine.engine.model_checks import check_undistributed
from zeroengine.integrations.accelerate import checks, settings, states
from zeroengine.integrations.accelerate.engines import (
    compiled,
    make_training_engine,
    model_of,
    parameters_of,
)
from zeroengine.integrations.accelerate.sample_groups import SampleGroupAccelerator
from zeroengine.integrations.accelerate.wrappers import EngineOwnedSchedule, ZeroAcceleratedOptimizer
from zeroengine.integrations.evaluation import make_evaluation_engine, trainable_parameters
from zeroengine.integrations.parameter_engines import engines_of

# The attribute by which accelerate knows what it has prepared.
PREPARED = "_is_accelerate_prepared"


class ZeroAccelerator(SampleGroupAccelerator):
    """An `Accelerator` whose `prepare` partitions models with zeroengine.

        accelerator = ZeroAccelerator(zero_config="zero3.json", gradient_accumulation_steps=4)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    Everything else is written as with `Accelerator`. `prepare` returns the model itself, and
    `zeroengine.engine_of(model)` is its engine. Each model has its own optimizer and engine. A model without trainable
    parameters, such as a reference model, is partitioned without one. Call the methods that move values of a model on
    every rank: `get_state_dict`, `save_model`, `save_state`, `load_state`, `free_memory` and `end_training`.

    Args:
        zero_config: The configuration: a JSON, YAML or HJSON file, a dict, or None for the file that zero-launch names.
            Keys that it leaves open take accelerate's values. See "Who decides what" in `settings.py`.
        arguments: The arguments of `Accelerator`.

    Raises:
        ZeroEngineError: The arguments or the variables of `accelerate launch` contradict the configuration.
    """

    def __init__(self, zero_config: ConfigLike | None = None, **arguments: Any) -> None:
        settings.check_not_distributed_otherwise(arguments)
        config = load(zero_config, argument="zero_config")
        self._requested_precision = arguments.pop("mixed_precision", None)
        config = settings.fill_loss_scale(config, arguments.get("kwargs_handlers") or ())
        config = settings.fill_parallelism(config, arguments.pop("parallelism_config", None))
        # Values that "auto" stands for are filled into what was written, which this keeps.
        self._written_config = config
        config = settings.fill_precision(config, self._requested_precision)
        num_steps = settings.choose_accumulation(config, arguments)
        if arguments.get("gradient_accumulation_plugin") is None:
            arguments["gradient_accumulation_steps"] = num_steps
        join_launched_ranks()
        # Without a GPU, accelerate trains a model of its own in each process unless it is told to use the CPUs.
        if not torch.cuda.is_available() and has_peers():
            arguments.setdefault("cpu", True)
        # The engine computes in the configuration's precision, so accelerate must neither cast nor scale.
        cuts = config.sequence_parallel_size > 1
        super().__init__(config.ranks_per_sample, cuts, mixed_precision="no", **arguments)
        checks.check_trains_with_peers(self.num_processes)
        self.zero_config = config
        self._batch_sizes: list[int] = []
        # Models that wait for their optimizer, without torch.compile's wrapper.
        self._waiting: list[nn.Module] = []
        # The engines of models that are not trained. No optimizer holds them.
        self._evaluation_engines: list[Engine] = []
        self._num_no_sync = 0

    @property
    def mixed_precision(self) -> str:
        """The precision of the configuration, in accelerate's words: "no", "fp16" or "bf16"."""
        return settings.precision_of(self.zero_config)

    # -- prepare ----------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Partition models with their optimizers, and prepare data loaders and schedules as accelerate does.

        Returns:
            What was passed, in the same order: models themselves, and wrappers of the other objects.

        Raises:
            ZeroEngineError: An optimizer belongs to no model or to several, or the configuration contradicts an
                argument.
        """
        for arg in args:
            if isinstance(arg, DataLoader) and not getattr(arg, PREPARED, False):
                size = settings.batch_size_of(arg, self.dataloader_config, self.num_groups)
                self._batch_sizes += [size] if size is not None else []
        # Models come before their optimizers, and these before their schedules, whatever the order of the arguments.
        prepared: dict[int, Any] = {id(arg): self.prepare_model(arg) for arg in args if isinstance(arg, nn.Module)}
        schedules = {id(arg.optimizer): arg for arg in args if isinstance(arg, DummyScheduler)}
        optimizers = [arg for arg in args if isinstance(arg, (torch.optim.Optimizer, DummyOptim))]
        for optimizer in optimizers:
            prepared[id(optimizer)] = own = self._prepare_optimizer(optimizer, schedules.get(id(optimizer)))
            if id(optimizer) in schedules:
                prepared[id(schedules[id(optimizer)])] = EngineOwnedSchedule(own.present_rates)
        return super().prepare(*(prepared.get(id(arg), arg) for arg in args), device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Partition a model: with the optimizer that is prepared next, or now if it is not trained.

        Args:
            model: The model.
            device_placement: Not used: the engine moves the model, unit by unit.
            evaluation_mode: Whether the model is not trained, although it may have trainable parameters.

        Raises:
            ZeroEngineError: The model is distributed over devices by `device_map`, or wrapped, such as in DDP.
        """
        # unwrap_model() below would take such a wrapper off, and leave its hooks in the model.
        check_undistributed(model)
        checks.check_on_one_device(model, self.verify_device_map(model))
        inner = self.unwrap_model(model, keep_torch_compile=False)
        engine = engine_of(inner)
        if engine in self._evaluation_engines and not evaluation_mode and trainable_parameters(inner):
            # The model was evaluated before it is trained.
            self._evaluation_engines.remove(engine)
            engine.release()
            engine = None
        if engine is None and inner not in self._waiting:
            if evaluation_mode or not trainable_parameters(inner):
                # Models with trainable parameters may be trained later.
                keys = ("units",) if trainable_parameters(inner) else ()
                self._evaluation_engines.append(make_evaluation_engine(inner, self._config_of_engine({}), keys))
                self._convert_outputs(self._evaluation_engines[-1])
            else:
                self._waiting.append(inner)
        if model is inner:
            model = compiled(inner, self.state.dynamo_plugin)
        if not any(known is model for known in self._models):
            self._models.append(model)
        setattr(model, PREPARED, True)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> ZeroAcceleratedOptimizer:
        """Partition the model that the optimizer is over, and return the wrapper whose `step` is the engine's.

        Raises:
            ZeroEngineError: The model was not prepared, or has another optimizer, or the configuration names one.
        """
        return self._prepare_optimizer(optimizer, None)

    def _prepare_optimizer(self, optimizer: Any, schedule: DummyScheduler | None) -> ZeroAcceleratedOptimizer:
        if isinstance(optimizer, ZeroAcceleratedOptimizer):
            if engines_of(parameters_of(optimizer)) == [optimizer.engine]:
                if not any(known is optimizer for known in self._optimizers):
                    self._optimizers.append(optimizer)
                return optimizer
            # Its engine has ended.
            optimizer = optimizer.optimizer
        models = [self.unwrap_model(model, keep_torch_compile=False) for model in self._models]
        model = model_of(parameters_of(optimizer), models)
        self._check_has_no_optimizer(model)
        # accelerate counts the batches of all groups of ranks, and the engine counts updates.
        batches_per_update = 1 if self.split_batches else self.num_groups
        prepared = make_training_engine(model, optimizer, schedule, self._config_of_engine, batches_per_update)
        self._convert_outputs(prepared.engine)
        self._waiting = [waiting for waiting in self._waiting if waiting is not model]
        setattr(prepared, PREPARED, True)
        self._optimizers.append(prepared)
        return prepared

    def _convert_outputs(self, engine: Engine) -> None:
        """Give the outputs of a model under autocast in fp32, as accelerate does."""
        if engine.config.autocast_dtype is not None:
            engine.module.register_forward_hook(lambda module, args, output: convert_to_fp32(output))

    def _check_has_no_optimizer(self, model: nn.Module) -> None:
        """Make room for an engine of `model`, unless it is being trained with another optimizer."""
        engine = engine_of(model)
        if engine is None:
            return
        checks.check_is_not_trained(model, engine in self._training_engines())
        # An earlier training, which free_memory() has ended, or an evaluation.
        self._evaluation_engines = [known for known in self._evaluation_engines if known is not engine]
        engine.release()

    def _config_of_engine(self, values: Mapping[str, Any]) -> Config:
        """Return the configuration of the next engine, from what accelerate knows by dotted key."""
        config = self._written_config
        if values:
            config = config.fill_auto(values, framework="accelerate", must_match=False)
        config = settings.fill_precision(config, self._requested_precision)
        return settings.fill_batch_size(config, self._batch_sizes, self.gradient_accumulation_steps, self.num_groups)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a schedule as accelerate does.

        Raises:
            ZeroEngineError: The configuration names a schedule as well, or this one is over another optimizer.
        """
        checks.check_one_schedule(scheduler, self.zero_config)
        checks.check_schedule(scheduler, self._optimizers)
        return super().prepare_scheduler(scheduler)

    # -- training ---------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Compute the gradients of `loss / gradient_accumulation_steps`, and reduce them where the step ends.

        Args:
            loss: A tensor of one element.
            model: The model whose loss scale applies. It is needed in fp16 with several models.
            kwargs: Further arguments of `Tensor.backward`.

        Raises:
            ZeroEngineError: A model was prepared without its optimizer, or several models have loss scales.
        """
        checks.check_all_have_optimizers(self._waiting)
        engines = self._training_engines()
        if not engines:
            super().backward(loss, **kwargs)
            return
        for engine in engines:
            # Gradients of the last micro-step are reduced while it computes, and others add up.
            if engine.config.manual_accumulation:
                engine.set_gradient_accumulation_boundary(self.sync_gradients and not self._num_no_sync)
        if self.gradient_accumulation_steps > 1:
            loss = loss / self.gradient_accumulation_steps
        if model is not None:
            engines = engines_of(model.parameters())
        if len(engines) == 1:
            engines[0].backward(loss, **kwargs)
        else:
            checks.check_unscaled(engines)
            # The loss may depend on several models, such as a generator's on its discriminator.
            loss.backward(**kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Put off the reduction of gradients where that costs no memory, which is at stages 0 and 1.

        The gradients are the same either way.
        """
        self._num_no_sync += 1
        try:
            yield
        finally:
            self._num_no_sync -= 1

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Run the block. All ranks have as many batches, so `even_batches=False` is an error."""
        even = self.even_batches if even_batches is None else even_batches
        checks.check_even_batches(even, self.num_processes)
        yield

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip the gradient of the step, and return its norm before clipping.

        Args:
            parameters: All parameters of one model, or all that are trained.
            max_norm: The largest norm. `math.inf` clips nothing.
            norm_type: 2, the only norm.

        Raises:
            ZeroEngineError: The parameters are a part of a model or of several models, or the step has further
                micro-steps.
        """
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not engines_of(params):
            norm: torch.Tensor = super().clip_grad_norm_(params, max_norm, norm_type)
            return norm
        engine = checks.engine_to_clip(params, norm_type)
        checks.check_step_ends(self.sync_gradients)
        if engine.config.manual_accumulation:
            engine.set_gradient_accumulation_boundary(True)
        return engine.clip_grad_norm_(max_norm)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Raise, as accelerate does under FSDP and DeepSpeed, where the parameters are an engine's."""
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        checks.check_not_engines(engines_of(params))
        super().clip_grad_value_(params, clip_value)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Enter `torch.autocast` where the configuration has `torch_autocast`.

        With bf16 or fp16, parameters have that dtype, and inputs of the model are cast, so nothing is entered.
        """
        dtype = self.zero_config.autocast_dtype
        handler = autocast_handler or self.autocast_handler or AutocastKwargs()
        if dtype is None:
            yield
            return
        with torch.autocast(self.device.type, dtype, handler.enabled, handler.cache_enabled):
            yield

    # -- saving -----------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return the whole model's state dict on rank 0, and an empty one elsewhere. Call it on every rank."""
        engine = engine_of(model)
        if engine is None:
            state_dict: dict[str, torch.Tensor] = super().get_state_dict(model, unwrap)
            return state_dict
        return engine.full_state_dict(rank0_only=True)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights. Each rank writes its part, and no rank holds the model. Call it on every rank.

        Args:
            model: A prepared model.
            save_directory: A folder on a disk that the ranks share.
            max_shard_size: The largest size of a file.
            safe_serialization: Whether to write safetensors. False: rank 0 gathers and pickles the weights.
        """
        engine = engine_of(model)
        if engine is None or not safe_serialization:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
        else:
            engine.save_weights(save_directory, shard_size=max_shard_size)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save what `load_state` needs to go on. Call it on every rank, between steps.

        The engines' checkpoints load at any stage and number of ranks. The rest is written as by accelerate.

        Args:
            output_dir: The folder; not needed with `automatic_checkpoint_naming`.
            safe_serialization: How models without an engine are written.
            kwargs: Further arguments of `Engine.save_checkpoint`, such as `frozen=False`.

        Returns:
            The folder.
        """
        return states.save(self, output_dir, safe_serialization, kwargs)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load what `save_state` saved, at any stage and on any number of ranks. Call it on every rank.

        Args:
            input_dir: The folder. None: the newest, with `automatic_checkpoint_naming`.
            load_kwargs: Further arguments of accelerate's `load`.
            kwargs: Further arguments of `Engine.load_checkpoint`, such as `strict=False`.
        """
        states.restore(self, input_dir, load_kwargs, kwargs)

    # -- the end ----------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> Any:
        """Forget what was prepared, and end the engines of the models among `objects`. Call it on every rank.

        Returns:
            None for each object, as accelerate does.
        """
        engines = [engine_of(arg) for arg in objects if isinstance(arg, nn.Module)]
        engines += [arg.engine for arg in objects if isinstance(arg, ZeroAcceleratedOptimizer)]
        for engine in dict.fromkeys(engines):
            if engine is not None:
                self._evaluation_engines = [known for known in self._evaluation_engines if known is not engine]
                engine.close()
        self._waiting, self._batch_sizes = [], []
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """End the engines, which leaves ordinary models, then the trackers and the process group."""
        for engine in dict.fromkeys([*self._training_engines(), *self._evaluation_engines]):
            engine.close()
        self._evaluation_engines = []
        super().end_training()
