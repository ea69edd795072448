"""`ZeroTrainerMixin`: a trainer of transformers that trains on the engine.

[Note: How the trainer meets the engine]
The trainer does all its work through an Accelerator, which `TrainerAccelerator` replaces, and through methods that are
meant to be overridden. The engine works on the model in place, so `prepare` returns the same module. What the trainer
would do by itself for a model that is whole on every rank, such as writing its weights, is overridden here.
"""

from __future__ import annotations

import functools
import importlib
import math
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import patch_environment
from torch import nn
from transformers import TrainerState
from transformers.utils import is_peft_available

from zeroengine.checkpoint.inspect import find_checkpoint
from zeroengine.config import ConfigLike
from zeroengine.engine.engine import Engine
from zeroengine.engine.gathered import gathered
from zeroengine.engine.initialize import engine_of
from zeroengine.engine.replay import ReplayTarget
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.accelerate.settings import PARALLELISM_VARIABLE
from zeroengine.integrations.accelerate.wrappers import EngineOwnedSchedule
from zeroengine.integrations.transformers.accelerator import TrainerAccelerator
from zeroengine.integrations.transformers.online import StreamedModel
from zeroengine.integrations.transformers.resume import POSITION, EpochStart, resume_data
from zeroengine.integrations.transformers.settings import (
    load_settings,
    own_optimizer,
    with_accumulation_of_trainer,
    with_number_of_steps,
)
from zeroengine.optim.factory import build_configured
from zeroengine.sequence.batches import shard_sequence

# The names that the trainer gives to the files of its schedule, its optimizer and its state.
SCHEDULER_NAME, OPTIMIZER_NAME, TRAINER_STATE_NAME = "scheduler.pt", "optimizer.pt", "trainer_state.json"
# The folder of the engine's checkpoint within a checkpoint of the trainer.
FOLDER = "zeroengine"

if TYPE_CHECKING:
    from transformers import Trainer
else:
    # The trainer comes after the mixin among the bases of a class, and may be any subclass of Trainer.
    Trainer = object


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model has adapters of peft, which need not be installed."""
    return is_peft_available() and isinstance(model, importlib.import_module("peft").PeftModel)


class ZeroTrainerMixin(Trainer):
    """Put this before a trainer class to train on the engine: `class ZeroSFT(ZeroTrainerMixin, SFTTrainer)`.

    Args:
        args: The arguments of the trainer, and so are `kwargs`.
        zero_config: The configuration of the engine, as of `zeroengine.initialize`. None: the file that zero-launch
            names. What it leaves open is taken from `TrainingArguments`.

    Raises:
        ZeroEngineError: The configuration and the `TrainingArguments` contradict each other.
    """

    # The trainer sets these.
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, zero_config: ConfigLike | None = None, **kwargs: Any) -> None:
        self._given_config = zero_config
        self._created_optimizer: torch.optim.Optimizer | None = None
        # The checkpoint that a run resumes from, where it begins in its data, and how far it has come since.
        self._resumed_from: Path | None = None
        self._epoch_start: EpochStart | None = None
        self._epoch = self._num_samples_of_epoch = 0
        super().__init__(*args, **kwargs)
        if self._settings.sequence_parallel_size > 1 and (self.label_smoother or self.compute_loss_func):
            raise ZeroEngineError("label_smoothing_factor and compute_loss_func need sequence_parallel_size of 1")
        # What TRL's online trainers send weights to vLLM with reads them from the model.
        if (generation := getattr(self, "vllm_generation", None)) is not None:
            generation.model = StreamedModel(
                generation, is_peft_model(self.model), lambda: self._require_engine("a sync of the weights for vLLM")
            )

    @property
    def engine(self) -> Engine | None:
        """The engine of the model; None before it is first evaluated or trained."""
        accelerator: TrainerAccelerator = self.accelerator
        return accelerator.engine or engine_of(self.model)

    # -- the accelerator ------------------------------------------------------------------------------

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # The engine computes in the precision of its configuration, so accelerate must not autocast or scale as well.
        self._accelerator_arguments = {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}
        self._accelerator_arguments.pop("parallelism_config", None)
        return self._accelerator_arguments

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, after a check of the configuration against the arguments."""
        self._settings = load_settings(self._given_config, self.args)
        with patch_environment(**{PARALLELISM_VARIABLE: "false"}):
            super().create_accelerator_and_postprocess()
        for kind, enabled in (("DeepSpeed", self.is_deepspeed_enabled), ("FSDP", self.is_fsdp_enabled)):
            if enabled:
                raise ZeroEngineError(
                    f"accelerate is set up for {kind}, and the model would be distributed twice. Choose a multi-GPU or "
                    "multi-CPU setup in `accelerate config`, or start the script with zero-launch or torchrun."
                )
        # The trainer names its class of accelerator in the method above. States of accelerators are shared, so this
        # one takes over what that one set up.
        settings = with_accumulation_of_trainer(self._settings, self.args)
        self.accelerator = TrainerAccelerator(settings, **self._accelerator_arguments)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the engine moves one unit at a time, so no device holds the whole model."""

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make another model, after the engine of the one before has ended."""
        self.accelerator.close_engine()
        model: nn.Module = super().call_model_init(trial)
        return model

    # -- training -------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, as the trainer does. A run may resume on any number of ranks, after the samples that it has seen."""
        self._resumed_from = self._epoch_start = None
        return super().train(*args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return the numbers of epochs and updates, which for a resumed run depend on the samples that it has seen."""
        values = super().set_initial_training_values(args, dataloader)
        if self._resumed_from is not None:
            state = TrainerState.load_from_json(str(self._resumed_from / TRAINER_STATE_NAME))
            self._epoch_start, values = resume_data(state, args, dataloader, self._samples_per_batch, values)
        return values

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epoch_and_batches: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        start = self._epoch_start
        return epoch_and_batches if start is None else (start.epoch, start.num_skipped)

    def _run_epoch(self, **values: Any) -> None:
        self._epoch, self._num_samples_of_epoch, start = values["epoch"], 0, self._epoch_start
        if start is not None and self._epoch == start.epoch:
            self._num_samples_of_epoch, values["steps_in_epoch"] = start.num_samples, start.num_batches
            updates = math.ceil(start.num_batches / self.args.gradient_accumulation_steps)
            values["num_update_steps_per_epoch"] = updates
        super()._run_epoch(**values)

    @property
    def _samples_per_batch(self) -> int:
        """The number of samples of a batch on all ranks together."""
        accelerator: TrainerAccelerator = self.accelerator
        return int(self._train_batch_size) * (1 if accelerator.split_batches else accelerator.num_groups)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        # The optimizer is built over parameters that are trainable and ordinary.
        self.accelerator.end_evaluation()
        if (generation := getattr(self, "vllm_generation", None)) is not None:
            # The tensors of another engine come in another order, so a server is told it again.
            generation._weight_metadata = None
        settings = with_number_of_steps(self._settings, self.args, max_steps)
        self.accelerator.zero_config = with_accumulation_of_trainer(settings, self.args)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the part of this rank of each batch of a step, and the number of labels."""
        parts = map(functools.partial(shard_sequence, engine=self.engine), epoch_iterator)
        batches, num_items = super().get_batch_samples(parts, num_batches, device)
        self._num_samples_of_epoch += len(batches) * self._samples_per_batch
        return batches, num_items

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        count, degree = super()._get_num_items_in_batch(batch_samples, device), self._settings.sequence_parallel_size
        if count is None or degree == 1:
            return count
        if not self.args.average_tokens_across_devices:
            count = self._require_engine("a batch").sequence_group.all_gather(count, "labels").sum()
        # The trainer divides by the degree, as each rank had the whole batch.
        return count * degree

    def get_tp_size(self) -> int:
        """Return the number of ranks that share a sample, by which the trainer divides batch sizes and counts."""
        return self._settings.ranks_per_sample

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        if self._settings.sequence_parallel_size == 1:
            # The trainer has counted the batches of all ranks, and each of them once for each rank that has it.
            seen = self.state.num_input_tokens_seen - before
            self.state.num_input_tokens_seen = before + seen // self.get_tp_size()

    def floating_point_ops(self, inputs: Any) -> float:
        """Return the operations of a batch on this rank."""
        operations: float = super().floating_point_ops(inputs)
        return operations if self._settings.sequence_parallel_size > 1 else operations / self.get_tp_size()

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Return False: the engine clips. The trainer would read `grad` of every parameter, which is None."""
        return False

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of the configuration, or the trainer's own if it names none."""
        section = self._settings.optimizer
        if section is None:
            optimizer: torch.optim.Optimizer = super().create_optimizer(model)
            return optimizer
        if self.optimizer is None:
            params = [param for param in self.model.parameters() if param.requires_grad]
            self.optimizer = self._created_optimizer = build_configured(section, self.model, params)
        # A second call of `train` finds the optimizer of the first, which accelerate has wrapped.
        elif getattr(self.optimizer, "optimizer", self.optimizer) is not self._created_optimizer:
            raise ZeroEngineError(
                f'the trainer was given a {type(self.optimizer).__name__}, and the configuration names "optimizer": '
                f'{{"type": "{section.type}"}}. Leave one of the two out.'
            )
        created: torch.optim.Optimizer = self.optimizer
        return created

    @classmethod
    def get_optimizer_cls_and_kwargs(cls, args: Any, model: nn.Module | None = None) -> tuple[Any, Any]:
        """Return the class of `args.optim` and its arguments: those of 8 bits need neither bitsandbytes nor torchao."""
        class_and_arguments: tuple[Any, Any] = own_optimizer(args) or super().get_optimizer_cls_and_kwargs(args, model)
        return class_and_arguments

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Create the trainer's own schedule, or a stand-in if the configuration names one, which the engine steps."""
        if self._settings.scheduler is None:
            self._check_schedule()
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is not None:
            raise ZeroEngineError(
                f'the trainer was given a {type(self.lr_scheduler).__name__}, and the configuration names "scheduler": '
                f'{{"type": "{self._settings.scheduler.type}"}}. Leave one of the two out.'
            )
        self.lr_scheduler = EngineOwnedSchedule(lambda: self.optimizer.last_rates)
        # The next call of `train` makes another one.
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _check_schedule(self) -> None:
        """Check that a schedule that was given to the trainer changes the rates of its optimizer.

        Raises:
            ZeroEngineError: It belongs to another optimizer.
        """
        owner = getattr(self.lr_scheduler, "optimizer", None)
        if owner is not None and owner not in (self.optimizer, self.optimizer.optimizer):
            raise ZeroEngineError(
                f"the trainer was given a {type(self.lr_scheduler).__name__} over an optimizer that is not the one "
                "that it trains with, so it would change nothing. Pass both, optimizers=(optimizer, scheduler), with "
                "the scheduler made from this optimizer."
            )

    # -- evaluation and generation ---------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. A model that is not trained yet is partitioned for it."""
        self.accelerator.prepare_evaluation(self.model)
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **generation: Any
    ) -> Any:
        """Predict one batch. All ranks generate for as long as one of them does, if parameters are partitioned."""
        if getattr(self.args, "predict_with_generate", False) and not prediction_loss_only and self._is_partitioned():
            generation = {"synced_gpus": True} | (generation or getattr(self, "_gen_kwargs", {}))
        inputs = shard_sequence(inputs, engine=self.engine)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **generation)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Generate completions. Each rank may run another number of forwards, so parameters are gathered.

        vLLM generates with weights of its own.
        """
        with nullcontext() if self.use_vllm or not self._is_partitioned() else gathered(self.model):
            return super()._generate_single_turn(*args, **kwargs)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the reference's log probabilities for DPO before training, with the model to be trained."""
        if self.ref_model is None:
            self.accelerator.prepare_evaluation(self.model)
        return super()._precompute_ref_logps(*args, **kwargs)

    def _is_partitioned(self) -> bool:
        """Return whether parameters have values only while they are used, on some rank of the model's engine."""
        engine = self.engine
        return engine is not None and engine.config.zero_optimization.stage == 3 and engine.world_size > 1

    # -- checkpoints ----------------------------------------------------------------------------------

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # A replay counts its steps from zero, and would replace or remove checkpoints of the run.
        if ReplayTarget.of_process() is None:
            self.state.stateful_callbacks[POSITION] = {"epoch": self._epoch, "samples": self._num_samples_of_epoch}
            super()._save_checkpoint(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = self._require_engine("a checkpoint")
        # The base of an adapter is loaded from its own files.
        engine.save_checkpoint(Path(output_dir, FOLDER), frozen=not is_peft_model(self.model))
        if not engine.config.checkpoint.async_save:
            # The folder is this checkpoint's own, and no later save needs its lock.
            engine.wait_for_checkpoint()
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Put off loading until there is an engine, which reads only the part of each rank."""
        folder = Path(resume_from_checkpoint)
        if not folder.is_dir():
            raise ZeroEngineError(
                f"resume_from_checkpoint: there is no folder {folder}. Write the folder of a checkpoint, such as "
                f"{self.args.output_dir}/checkpoint-500, or True for the newest one in {self.args.output_dir}."
            )
        if not (folder / FOLDER).is_dir() and (folder / OPTIMIZER_NAME).is_file():
            raise ZeroEngineError(
                f"{folder} is a checkpoint of a trainer without the engine, whose {OPTIMIZER_NAME} cannot be "
                "partitioned. Start from its weights: load the model with from_pretrained() from there, and leave "
                "resume_from_checkpoint out."
            )
        self._resumed_from = folder
        # The engine's checkpoint, which save_only_model leaves out, has the trained adapter and not DPO's reference.
        has_all = (folder / FOLDER).is_dir() and not (is_peft_model(self.model) and len(self.model.peft_config) > 1)
        if not has_all and is_peft_model(self.model) and self.engine is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        engine = self._require_engine("resume_from_checkpoint")
        if Path(checkpoint, FOLDER).is_dir():
            # The Trainer's own counters are those of this checkpoint, and not of a newer snapshot in memory.
            found, _ = find_checkpoint(Path(checkpoint, FOLDER), None)
            engine.load_checkpoint(found.parent, found.name)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))
        elif not is_peft_model(self.model):
            engine.load_weights(checkpoint, strict=False)

    def _load_best_model(self) -> None:
        engine, best = self._require_engine("load_best_model_at_end"), Path(self.state.best_model_checkpoint)
        if (best / FOLDER).is_dir():
            # These values are fp32, those of the weights beside them may be rounded.
            engine.load_checkpoint(best / FOLDER, weights_only=True)
        elif is_peft_model(self.model):
            with gathered(self.model):
                super()._load_best_model()
        else:
            engine.load_weights(best, strict=False)

    def _require_engine(self, purpose: str) -> Engine:
        if self.engine is None:
            raise ZeroEngineError(f"{purpose} needs an engine, which train() makes")
        return self.engine

    # -- weights --------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the complete weights, which `from_pretrained` loads. Call it on every rank."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call=_internal_call)
            return
        output_dir = self.args.output_dir if output_dir is None else output_dir
        # The base of an adapter is not written, so it is not gathered either.
        adapter_only = is_peft_model(self.model) and len(self.model.peft_config) == 1
        rank0_only = not self.args.save_on_each_node
        # With save_on_each_node one rank of every node writes, otherwise rank 0 alone.
        state_dict = self.engine.full_state_dict(trainable_only=adapter_only, rank0_only=rank0_only)
        self._save(output_dir, state_dict=state_dict)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
