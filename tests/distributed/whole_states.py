"""Reads the masters and the optimizer's states of all parameters by one sum over ranks.

`full_master` and `full_optimizer_state` take two exchanges for each value, of which a model has a hundred. Their own
tests are in tests/engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import zeroengine
from zeroengine.engine.parameter_access import LocatedParameter, full_master

ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")
NUMBERS = ("step", "count")  # the states that are no value for each element


def whole_states(engine: zeroengine.Engine, keys: Sequence[str] = ADAM_STATE) -> dict[str, torch.Tensor]:
    """Return the master of each parameter by its name, and the states of those that are trained. A collective.

    The values are those of `full_master` and of `full_optimizer_state` ("NAME exp_avg"), of this rank's replica.
    """
    states: dict[str, torch.Tensor] = {}
    to_sum: dict[str, torch.Tensor] = {}
    for name, param in engine.module.named_parameters():
        located = LocatedParameter(param)
        shard, optimizer = located.shard, located.parts.states.optimizer
        if shard is None:
            states[name] = full_master(param)
            continue
        if shard.may_be_written:
            shard.reload_master()
        to_sum[name] = located.expand(located.owned_parts(shard.master))
        for key in keys:
            values = optimizer.state_values(shard, located.index, key)
            if key not in NUMBERS:
                to_sum[f"{name} {key}"] = located.expand(values)
                continue
            # Each rank with a part of the parameter has the number.
            numbers = [value.item() for _, value in values]
            assert len(set(numbers)) <= 1, f"{name}: {numbers}"
            to_sum[f"{name} {key}"] = torch.tensor([numbers[0], 1.0] if numbers else [0.0, 0.0])
    summed = torch.cat([value.flatten() for value in to_sum.values()])
    engine._parts.ranks.replica_group.all_reduce(summed, "of values")
    pieces = summed.split([value.numel() for value in to_sum.values()])
    for (name, value), piece in zip(to_sum.items(), pieces, strict=True):
        is_number = name.partition(" ")[2] in NUMBERS
        states[name] = piece[0] / piece[1].clamp(min=1.0) if is_number else piece.view(value.shape)
    return states
