"""The state of the fused rules, as a kernel takes it, and as the methods of the caller's optimizer do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import ZeroEngineError
from zeroengine.ops import UpdateArrays
from zeroengine.optim.backends.interface import BackendParts
from zeroengine.optim.backends.moment_state import MomentState
from zeroengine.optim.backends.over_shards import OptimizerOverShards
from zeroengine.optim.fused_rules import class_rule_of, fused_rule_of
from zeroengine.optim.optimizer_shard import OptimizerShard

T = TypeVar("T")


class FusedState(MomentState):
    """See ``MomentState``: moments, and a step count for each parameter."""

    def arrays(self, shard: OptimizerShard) -> UpdateArrays:
        """Return what an update of a shard reads and writes."""
        moments, scales = tuple(self.moments[shard.index]), tuple(self.scales[shard.index])
        return UpdateArrays(shard.master, shard.gradient, moments, scales, shard.low_precision_param, shard.average)


def fused_state(parts: BackendParts) -> FusedState:
    """Return the state of the caller's optimizer, which a fused rule updates, for every shard."""
    rule = fused_rule_of(parts.base_optimizer)
    assert rule is not None
    initial_values = {
        param: value
        for group in parts.base_optimizer.param_groups
        if (value := rule.initial_value(group))
        for param in group["params"]
    }
    return FusedState(
        parts.shards, rule.moments, counts_steps=True, needs_steps=rule.keeps_step, initial_values=initial_values
    )


def run_over_state(parts: BackendParts, state: FusedState, act: Callable[[torch.optim.Optimizer], T]) -> T:
    """Return what ``act`` returns of the caller's optimizer over the shards, whose state is ``state`` during the call.

    Raises:
        ZeroEngineError: ``act`` gave a parameter another state than a fused rule keeps.
    """
    over_shards = OptimizerOverShards(parts)
    states, keeps_step = over_shards.optimizer.state, class_rule_of(parts.base_optimizer).keeps_step
    for shard, span, param in over_shards:
        values = state.of(shard, span)
        # A read of a mapped file whose disk fails would end the process; this raises.
        for tensor in (param, *values.elements.values(), *values.scales.values()):
            populate(tensor, write=True)
        # torch's optimizers have no state before the first step of a parameter.
        if values.numbers["step"]:
            elements = {key: values.read(key).view_as(param) for key in values.elements}
            states[param] = {**(values.numbers if keeps_step else {}), **elements}
    result = over_shards.run(act)
    known = {*state.names, "step"}
    for shard, span, param in over_shards:
        present = states.get(param, {})
        if unknown := sorted(present.keys() - known):
            raise ZeroEngineError(
                f"{type(over_shards.optimizer).__name__}: a method gave parameters the state {', '.join(unknown)}, and "
                f"the fused kernel, which runs the step of its class, keeps {', '.join(sorted(known))} alone. "
                "Override step() too, such as by one that calls super().step(): then torch runs it."
            )
        if not present:
            state.clear(shard, span)
            continue
        values = state.of(shard, span)
        for key, value in values.elements.items():
            # Most methods write in place. Others assign a new tensor.
            if values.scales or present[key].data_ptr() != value.data_ptr():
                values.write(key, present[key].reshape(-1))
        # Where torch's optimizer keeps no step count, a parameter with a state has been updated.
        step = present.get("step", values.numbers["step"].clamp(min=1))
        state.set_numbers(shard, span, {"step": torch.as_tensor(step)})
    return result
