"""``engine.optimizer`` under DeepSpeed's names: hyperparameters, this rank's states, and the loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zeroengine.engine.engine import Engine
from zeroengine.engine.parameter_access import full_gradient
from zeroengine.integrations.deepspeed.leaf_modules import z3_leaf_module
from zeroengine.optim.caller_optimizer import load_hyperparameters
from zeroengine.partition.layout import ShardSpan


class LocalStateOptimizer(torch.optim.Optimizer):
    """The optimizer of an engine, whose ``state`` holds this rank's elements of each parameter's states, flat.

    Args:
        engine: The engine.
    """

    # The groups are those of the engine's optimizer, so torch's constructor, which would make others, is not called.
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.defaults = engine.optimizer.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups, shared with the engine and its schedule."""
        groups: list[dict[str, Any]] = self._engine.optimizer.param_groups
        return groups

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        """This rank's part of each state, by parameter. Moments of 8 bits are copies of their values."""
        optimizer = self._engine.optimizer
        states: dict[torch.Tensor, dict[str, Any]] = {}
        for shard in optimizer.shards:
            for index, param in enumerate(shard.unit.params):
                shapes = optimizer.state_shapes(shard, index)
                values = {key: optimizer.state_values(shard, index, key) for key in shapes}
                if values:
                    states[param] = {
                        key: parts[0][1] if shapes[key] is not None else torch.cat([value for _, value in parts])
                        for key, parts in values.items()
                    }
                elif (state := optimizer.state_of(shard)).keys(shard) is not None:
                    # As in DeepSpeed, a rank without elements of the parameter has states, which are empty here.
                    empty = state.of(shard, ShardSpan(index, 0, 0, 0))
                    states[param] = {key: empty.read(key) for key in empty.elements} | empty.numbers
        return states

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """End the step, as ``engine.optimizer.step()`` does."""
        self._engine.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step so far, or set them to zero."""
        self._engine.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: groups belong to the model before ``initialize``."""
        self._engine.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the hyperparameters, and this rank's states by the number of the parameter."""
        numbers: dict[torch.Tensor, int] = {}
        for group in self.param_groups:
            for param in group["params"]:
                numbers.setdefault(param, len(numbers))
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": [numbers[p] for p in params]}
            for group in self.param_groups
            for params in [group["params"]]
        ]
        return {"state": {numbers[param]: state for param, state in self.state.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the hyperparameters.

        Raises:
            ZeroEngineError: The dict has states, which ``load_checkpoint`` loads.
        """
        load_hyperparameters(self, state_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._engine.optimizer!r}"


class GradientNorm:
    """The norm of an engine's last gradient as in DeepSpeed: in fp16 a step that is skipped leaves the one before."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._last_finite = engine, 0.0

    def read(self) -> torch.Tensor | None:
        """Return the norm (0-d, in fp64: scripts take ``item()``); None before the first step. Call it at each step."""
        norm = self._engine.grad_norm
        if norm is not None and self._engine.config.scales_loss:
            norm = self._last_finite = norm if math.isfinite(norm) else self._last_finite
        return None if norm is None else torch.tensor(norm, dtype=torch.float64, device=self._engine.device)


class ScaleOfLoss:
    """The loss scale of an engine as DeepSpeed's ``loss_scaler``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def cur_scale(self) -> float:
        """The present scale."""
        return self._engine.loss_scale

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale adapts."""
        return self._engine.loss_scaler.dynamic

    @property
    def scale_window(self) -> int:
        """The number of steps without overflow after which the scale doubles."""
        return int(self._engine.config.fp16.loss_scale_window)

    @property
    def cur_hysteresis(self) -> int:
        """The number of overflows until the scale halves."""
        return self._engine.loss_scaler.hysteresis_left

    @property
    def cur_iter(self) -> int:
        """The number of steps, skipped ones included."""
        return self._engine.loss_scaler.steps


class DeepSpeedOptimizer(LocalStateOptimizer):
    """What ``initialize`` returns as the optimizer, at stage 0."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.optimizer = LocalStateOptimizer(engine)
        self.loss_scaler = ScaleOfLoss(engine)
        self._skipped_before = 0
        self.overflow = False
        self._norm = GradientNorm(engine)

    def note_step(self) -> None:
        """Record whether the last step was skipped, and in fp16, where a step has waited for it, the norm."""
        if self._engine.config.scales_loss:
            self._norm.read()
        skipped = self._engine.skipped_steps
        self.overflow, self._skipped_before = skipped > self._skipped_before, skipped

    @property
    def loss_scale(self) -> float:
        """The factor of the loss."""
        return self._engine.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._engine.loss_scale = scale

    cur_scale = loss_scale

    def needs_scaler(self) -> bool:
        """Return whether a loss is to be scaled before a backward of the script's own."""
        return self._engine.config.scales_loss

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return self.loss_scaler.dynamic

    @property
    def _global_grad_norm(self) -> torch.Tensor | None:
        return self._norm.read()

    @property
    def clip_grad(self) -> float:
        """The largest norm of the gradient; 0 clips nothing."""
        return self._engine.gradient_clipping

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Compute gradients, as ``engine.backward``."""
        self._engine.backward(loss, retain_graph=retain_graph)

    @property
    def _masters(self) -> list[torch.Tensor]:
        """This rank's shards of the fp32 master weights, one of each unit."""
        return [shard.master for shard in self._engine.optimizer.shards]

    # The names of these lists in DeepSpeed's optimizers; what is in them is zeroengine's partition.
    fp32_groups_flat = fp32_groups = _masters


class DeepSpeedZeroOptimizer(DeepSpeedOptimizer):
    """What ``initialize`` returns as the optimizer, at stages 1 and 2."""

    single_partition_of_fp32_groups = DeepSpeedOptimizer._masters


class DeepSpeedZeroOptimizer_Stage3(DeepSpeedOptimizer):
    """What ``initialize`` returns as the optimizer, at stage 3."""

    fp32_partitioned_groups_flat = DeepSpeedOptimizer._masters

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """The parameters of each module that is marked as a leaf."""
        return {module: list(module.parameters()) for module in self._engine.module.modules() if z3_leaf_module(module)}

    def _get_norm_groups(self) -> list[torch.Tensor]:
        """Return the norm of the mean gradient of each param group, 0-d, between backward and step. A collective."""
        norms = []
        for group in self.param_groups:
            gradients = (full_gradient(param) for param in group["params"])
            # One whole gradient exists at a time.
            squares = [gradient.double().square().sum() for gradient in gradients if gradient is not None]
            norms.append(torch.stack(squares).sum().sqrt().float() if squares else torch.tensor(0.0))
        return norms


def make_optimizer_view(engine: Engine) -> torch.optim.Optimizer:
    """Return the optimizer of an engine under DeepSpeed's names.

    At stage 0 in fp32 it is the one that was passed to ``initialize``, as in DeepSpeed: its ``step`` and ``zero_grad``
    call the engine.
    """
    stage = int(engine.config.zero_optimization.stage)
    if stage == 0 and engine.config.low_precision is None:
        return engine.base_optimizer
    kind = DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer if stage else DeepSpeedOptimizer
    return kind(engine)
