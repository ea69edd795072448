"""The state of Adam for every shard: two moments for each element and a step count for each parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.backends.interface import BackendParts, SpanState, StateKeys
from zeroengine.optim.backends.over_shards import OptimizerOverShards
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.layout import ShardSpan

T = TypeVar("T")
KEYS = frozenset({"exp_avg", "exp_avg_sq", "step"})


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

    def __init__(self, shards: Sequence[OptimizerShard], moments_dtype: torch.dtype) -> None:
        # Moments exist from the start, so that too little memory fails in ``initialize`` and not in the first step.
        self.moments = {shard.index: (shard.zeros(moments_dtype), shard.zeros(moments_dtype)) for shard in shards}
        self.steps = {shard.index: [0] * len(shard.unit.params) for shard in shards}

    def keys(self, shard: OptimizerShard) -> frozenset[str]:
        """See ``ShardState``."""
        return KEYS

    def spans(self, shard: OptimizerShard) -> Iterator[ShardSpan]:
        """See ``ShardState``."""
        return shard.spans()

    def is_whole(self, shard: OptimizerShard) -> bool:
        """See ``ShardState``."""
        return False

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


def run_over_adam_state(parts: BackendParts, state: AdamState, act: Callable[[torch.optim.Optimizer], T]) -> T:
    """Return what ``act`` returns of the caller's optimizer over the shards, whose state is ``state`` during the call.

    Raises:
        ZeroEngineError: ``act`` gave a parameter another state than Adam's.
    """
    over_shards = OptimizerOverShards(parts)
    states = over_shards.optimizer.state
    for shard, span, param in over_shards:
        values = state.of(shard, span)
        # A read of a mapped file whose disk fails would end the process; this raises.
        for tensor in (param, *values.elements.values()):
            populate(tensor, write=True)
        # torch's Adam has no state before the first step of a parameter.
        if values.numbers["step"]:
            elements = {key: value.view_as(param) for key, value in values.elements.items()}
            states[param] = {**values.numbers, **elements}
    result = over_shards.run(act)
    for shard, span, param in over_shards:
        present = states.get(param, {})
        unknown = sorted(present.keys() - KEYS)
        if unknown:
            raise ZeroEngineError(
                f"{type(over_shards.optimizer).__name__}: a method gave parameters the state {', '.join(unknown)}, and "
                "the fused kernel, which runs the step of Adam and AdamW, keeps exp_avg, exp_avg_sq and step alone. "
                "Override step() too, such as by one that calls super().step(): then torch runs it."
            )
        if not present:
            state.clear(shard, span)
            continue
        for key, value in state.of(shard, span).elements.items():
            # Most methods write in place. Others assign a new tensor.
            if present[key].data_ptr() != value.data_ptr():
                value.copy_(present[key].reshape(-1))
        state.set_numbers(shard, span, {"step": torch.as_tensor(present["step"])})
    return result
