"""The rule of Adam: which optimizers have it, its state, and their own methods over that state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.backends.interface import BackendParts
from zeroengine.optim.backends.moment_state import MomentState
from zeroengine.optim.backends.over_shards import OptimizerOverShards

T = TypeVar("T")
MOMENTS = ("exp_avg", "exp_avg_sq")


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


def adam_state(parts: BackendParts) -> MomentState:
    """Return the state of Adam for every shard: two moments and a step count."""
    return MomentState(parts.shards, MOMENTS, parts.moments_dtype, counts_steps=True)


def run_over_adam_state(parts: BackendParts, state: MomentState, act: Callable[[torch.optim.Optimizer], T]) -> T:
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
        unknown = sorted(present.keys() - {*MOMENTS, "step"})
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
