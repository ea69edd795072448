"""`ZeroTrainerMixin`: a trainer of transformers that trains on the engine.

[Note: How the trainer meets the engine]
The trainer does all its work through an Accelerator, which `TrainerAccelerator` replaces, and through methods that are
meant to be overridden. The engine works on the model in place, so `prepare` returns the same module. What the trainer
would do by itself for a model that is whole on every rank, such as writing its weights, is overridden here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroengine.config import Config
from zeroengine.engine.engine import Engine
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.transformers.accelerator import EngineSchedule, TrainerAccelerator
from zeroengine.integrations.transformers.settings import load_settings, with_manual_accumulation, with_number_of_steps
from zeroengine.optim.factory import build_optimizer

# The name that the trainer gives to the file of its schedule.
SCHEDULER_NAME = "scheduler.pt"
# The folder of the engine's checkpoint within a checkpoint of the trainer.
FOLDER = "zeroengine"

if TYPE_CHECKING:
    from transformers import Trainer
else:
    # The trainer comes after the mixin among the bases of a class, and may be any subclass of Trainer.
    Trainer = object


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

    def __init__(
        self, *args: Any, zero_config: str | Path | Mapping[str, Any] | Config | None = None, **kwargs: Any
    ) -> None:
        self._given_config = zero_config
        self._created_optimizer: torch.optim.Optimizer | None = None
        super().__init__(*args, **kwargs)

    @property
    def engine(self) -> Engine | None:
        """The engine of the model that is trained; None before the training has begun."""
        accelerator: TrainerAccelerator = self.accelerator
        return accelerator.engine

    # -- the accelerator ------------------------------------------------------------------------------

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # The engine computes in the precision of its configuration, so accelerate must not autocast or scale as well.
        self._accelerator_arguments = {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}
        return self._accelerator_arguments

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, after a check of the configuration against the arguments."""
        self._settings = load_settings(self._given_config, self.args)
        super().create_accelerator_and_postprocess()
        for kind, enabled in (("DeepSpeed", self.is_deepspeed_enabled), ("FSDP", self.is_fsdp_enabled)):
            if enabled:
                raise ZeroEngineError(
                    f"accelerate is set up for {kind}, and the model would be distributed twice. Choose a multi-GPU or "
                    "multi-CPU setup in `accelerate config`, or start the script with zero-launch or torchrun."
                )
        # The trainer names its class of accelerator in the method above. States of accelerators are shared, so this
        # one takes over what that one set up.
        self.accelerator = TrainerAccelerator(self._settings, **self._accelerator_arguments)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the engine moves one unit at a time, so no device holds the whole model."""

    # -- training -------------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        settings = with_number_of_steps(self._settings, self.args, max_steps)
        self.accelerator.zero_config = with_manual_accumulation(settings, self.args)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of the configuration, or the trainer's own if it names none."""
        section = self._settings.optimizer
        if section is None:
            optimizer: torch.optim.Optimizer = super().create_optimizer(model)
            return optimizer
        if self.optimizer is None:
            params = [param for param in self.model.parameters() if param.requires_grad]
            self.optimizer = self._created_optimizer = build_optimizer(section.type, params, dict(section.params))
        # A second call of `train` finds the optimizer of the first, which accelerate has wrapped.
        elif getattr(self.optimizer, "optimizer", self.optimizer) is not self._created_optimizer:
            raise ZeroEngineError(
                f'the trainer was given a {type(self.optimizer).__name__}, and the configuration names "optimizer": '
                f'{{"type": "{section.type}"}}. Leave one of the two out.'
            )
        created: torch.optim.Optimizer = self.optimizer
        return created

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Create the trainer's own schedule, or a stand-in if the configuration names one, which the engine steps."""
        if self._settings.scheduler is None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is not None:
            raise ZeroEngineError(
                f'the trainer was given a {type(self.lr_scheduler).__name__}, and the configuration names "scheduler": '
                f'{{"type": "{self._settings.scheduler.type}"}}. Leave one of the two out.'
            )
        self.lr_scheduler = EngineSchedule(self.optimizer)
        # The next call of `train` makes another one.
        self._created_lr_scheduler = True
        return self.lr_scheduler

    # -- checkpoints ----------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._require_engine("_save_optimizer_and_scheduler()").save_checkpoint(Path(output_dir, FOLDER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _require_engine(self, call: str) -> Engine:
        if self.engine is None:
            raise ZeroEngineError(f"{call} before train(): there is no engine yet")
        return self.engine

    # -- weights --------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the complete weights, which `from_pretrained` loads. Call it on every rank."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call=_internal_call)
            return
        output_dir = self.args.output_dir if output_dir is None else output_dir
        # With save_on_each_node one rank of every node writes, otherwise rank 0 alone.
        state_dict = self.engine.full_state_dict(rank0_only=not self.args.save_on_each_node)
        self._save(output_dir, state_dict=state_dict)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
