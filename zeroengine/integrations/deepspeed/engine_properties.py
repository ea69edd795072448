"""What scripts read of ``DeepSpeedEngine``: counters, hyperparameters, and the values of the configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeroengine.engine.engine import Engine
from zeroengine.integrations.deepspeed.optimizer import GradientNorm
from zeroengine.integrations.deepspeed.settings import DeepSpeedConfig


class EngineProperties(nn.Module):
    """The part of ``DeepSpeedEngine`` that changes nothing but hyperparameters.

    DeepSpeed has a method of the engine for almost every key of the configuration, so these fill a file of their own.

    Args:
        engine: The engine of zeroengine.
        config: The configuration under DeepSpeed's names.
    """

    def __init__(self, engine: Engine, config: DeepSpeedConfig) -> None:
        super().__init__()
        self.engine, self._config = engine, config
        # The samples of all ranks, where every step() updates and no configuration says how many micro-steps it ends.
        self._unmanaged_samples = 0
        self._norm = GradientNorm(engine)
        # What global_samples has beside the present batch size of every step, where that has changed.
        self._samples_of_other_sizes = 0

    # -- counters ---------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """The number of steps, skipped ones included."""
        return self.engine.global_steps + self.engine.skipped_steps

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because the gradient was not finite."""
        return self.engine.skipped_steps

    @property
    def micro_steps(self) -> int:
        """The number of calls of ``step``."""
        return self.engine.micro_steps

    @property
    def global_samples(self) -> int:
        """The samples of all steps, skipped ones included; without managed accumulation those of this process."""
        if not self.managed_gradient_accumulation():
            return self._unmanaged_samples
        return self._samples_of_other_sizes + self.global_steps * self.train_batch_size()

    @property
    def lr_scheduler(self) -> Any:
        """The LR schedule that ``step`` steps, or None."""
        return self.engine.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        self.engine.lr_scheduler = schedule

    client_lr_scheduler = lr_scheduler

    @property
    def loss_scale(self) -> float:
        """The factor of the loss."""
        return self.engine.loss_scale

    cur_scale = loss_scale

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """Return the norm of the last step's gradient before clipping (0-d, fp64); None before the first step.

        In fp16 a step that was skipped leaves the norm of the one before, at first 0, as in DeepSpeed.
        """
        return self._norm.read()

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each param group."""
        return [group["lr"] for group in self.engine.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every param group."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of each param group."""
        return [group.get("betas", group.get("momentum")) for group in self.engine.optimizer.param_groups]

    # -- the configuration ------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Return the samples of a step over all ranks."""
        return int(self.engine.config.train_batch_size or 0)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-step on one rank."""
        return int(self.engine.config.train_micro_batch_size_per_gpu)

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps of a step."""
        return int(self.engine.config.gradient_accumulation_steps)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples of a step over all ranks, between steps, by another number of micro-steps.

        Raises:
            ValueError: They are no multiple of a micro-step's.
        """
        per_micro_step = self.train_micro_batch_size_per_gpu() * self.engine.num_sample_groups
        steps, rest = divmod(train_batch_size, per_micro_step) if type(train_batch_size) is int else (0, 0)
        if rest or steps < 1:
            raise ValueError(f"the train batch size is a multiple of {per_micro_step}, found {train_batch_size!r}")
        self._set_sizes(self.train_micro_batch_size_per_gpu(), steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the samples of a micro-step on one rank, which are counted, and which ``deepspeed_io`` loads.

        Raises:
            ZeroEngineError: It is no positive whole number, or a step is in progress.
        """
        self._set_sizes(micro_batch_size, self.gradient_accumulation_steps())

    def _set_sizes(self, micro_batch_size: int, steps: int) -> None:
        samples = self.global_samples
        # Within a step this raises, and then nothing has changed.
        self.engine.set_gradient_accumulation_steps(steps, micro_batch_size)
        self._samples_of_other_sizes += samples - self.global_samples

    def managed_gradient_accumulation(self) -> bool:
        """Return whether ``gradient_accumulation_steps`` decides which ``step`` updates; otherwise every one does."""
        return self._config.managed_gradient_accumulation

    def gradient_clipping(self) -> float:
        """Return the largest norm of the gradient; 0 clips nothing."""
        return self.engine.gradient_clipping

    def steps_per_print(self) -> int | None:
        """Return the steps between two lines of progress."""
        return self.engine.config.steps_per_print

    def zero_optimization(self) -> bool:
        """Return whether states are partitioned."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """Return the stage, 0 to 3."""
        return int(self.engine.config.zero_optimization.stage)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return True: whole weights can be saved at stage 3, whatever the key of this name says."""
        return True

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are partitioned."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are partitioned."""
        return self.zero_optimization_stage() >= 3

    def zero_offload_optimizer(self) -> Any:
        """Return the section "offload_optimizer"."""
        return self.engine.config.zero_optimization.offload_optimizer

    def zero_offload_param(self) -> Any:
        """Return the section "offload_param"."""
        return self.engine.config.zero_optimization.offload_param

    def fp16_enabled(self) -> bool:
        """Return whether the model computes in fp16."""
        return bool(self.engine.config.fp16.enabled)

    def bfloat16_enabled(self) -> bool:
        """Return whether the model computes in bf16."""
        return bool(self.engine.config.bf16.enabled)

    def torch_autocast_enabled(self) -> bool:
        """Return whether forwards run under torch.autocast."""
        return bool(self.engine.config.torch_autocast.enabled)

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale adapts."""
        return self.engine.loss_scaler.dynamic

    def optimizer_name(self) -> str | None:
        """Return the optimizer's name in the configuration, in small letters."""
        return self._config.optimizer_name

    def optimizer_params(self) -> Any:
        """Return the optimizer's parameters in the configuration."""
        return self._config.optimizer_params

    def scheduler_name(self) -> str | None:
        """Return the schedule's name in the configuration."""
        return self._config.scheduler_name
