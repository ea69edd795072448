"""The state of Adam for every shard: two moments for each element and a step count for each parameter."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroengine.disk.mapped_memory import populate
from zeroengine.optim.backends.interface import SpanState, StateKeys
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.layout import ShardSpan


def runs_fused_adam(optimizer: torch.optim.Optimizer, shards: Sequence[OptimizerShard]) -> bool:
    """Return whether the fused Adam kernels update as ``optimizer`` does."""
    return has_adam_rule(optimizer) and all(shard.master.dtype is torch.float32 for shard in shards)


def has_adam_rule(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` updates fp32 masters as the fused Adam kernels do.

    A subclass that overrides ``step`` may update differently, and the kernels have no AMSGrad.
    """
    # torch wraps every class's `step` in a profiling hook, so compare what is inside.
    adam_steps = {inspect.unwrap(cls.step) for cls in (torch.optim.Adam, torch.optim.AdamW)}
    return inspect.unwrap(type(optimizer).step) in adam_steps and not any(
        group.get("amsgrad") for group in optimizer.param_groups
    )


def has_decoupled_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether weight decay multiplies the parameter (AdamW) instead of adding to the gradient (Adam)."""
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay", False))


class AdamState:
    """See ``ShardState``.

    Args:
        moments_dtype: fp32, or bf16, which the kernels round stochastically.

    Attributes:
        moments: For each shard, by its index, the first and the second moment.
        steps: For each shard, by its index, the step count of every parameter of its unit.
    """

    keys = frozenset({"exp_avg", "exp_avg_sq", "step"})

    def __init__(self, shards: Sequence[OptimizerShard], moments_dtype: torch.dtype) -> None:
        # Moments exist from the start, so that too little memory fails in ``initialize`` and not in the first step.
        self.moments = [(shard.zeros(moments_dtype), shard.zeros(moments_dtype)) for shard in shards]
        self.steps = [[0] * len(shard.unit.params) for shard in shards]

    def of(self, shard: OptimizerShard, span: ShardSpan) -> SpanState:
        """See ``ShardState``."""
        exp_avg, exp_avg_sq = (moment[span.shard_slice] for moment in self.moments[shard.index])
        # A float on the CPU, as torch's Adam keeps it, whatever torch's default device is.
        step = torch.tensor(float(self.steps[shard.index][span.param_index]), device="cpu")
        return SpanState({"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, {"step": step})

    def create(self, shard: OptimizerShard, span: ShardSpan, keys: StateKeys) -> None:
        """Do nothing: moments and step counts exist from the start."""

    def set_numbers(self, shard: OptimizerShard, span: ShardSpan, numbers: Mapping[str, torch.Tensor]) -> None:
        """See ``ShardState``."""
        # A parameter without a step count starts as if it was never updated.
        self.steps[shard.index][span.param_index] = int(numbers["step"].item()) if "step" in numbers else 0

    def clear(self, shard: OptimizerShard, span: ShardSpan) -> None:
        """See ``ShardState``."""
        for moment in self.moments[shard.index]:
            populate(moment[span.shard_slice], write=True)
            moment[span.shard_slice].zero_()
        self.steps[shard.index][span.param_index] = 0

    def tensors(self, shard: OptimizerShard) -> list[torch.Tensor]:
        """See ``ShardState``."""
        return list(self.moments[shard.index])

    whole_shard_tensors = tensors
