"""Reads the masters and the optimizer's states of all parameters by one sum over ranks.

`full_master` and `full_optimizer_state` take two exchanges for each value, of which a model has a hundred. Their own
tests are in tests/engine.
"""

from __future__ import annotations

import torch

import zeroengine
from zeroengine.engine.parameter_access import LocatedParameter, full_master


def whole_states(engine: zeroengine.Engine) -> dict[str, torch.Tensor]:
    """Return the master of each parameter by its name, and Adam's states of those that are trained. A collective.

    The values are those of `full_master` and of `full_optimizer_state` ("NAME exp_avg", "NAME exp_avg_sq" and
    "NAME step"), of this rank's replica.
    """
    states: dict[str, torch.Tensor] = {}
    to_sum: dict[str, torch.Tensor] = {}
    for name, param in engine.module.named_parameters():
        located = LocatedParameter(param)
        shard, optimizer = located.shard, located.parts.optimizer
        if shard is None:
            states[name] = full_master(param)
            continue
        if shard.may_be_written:
            shard.reload_master()
        to_sum[name] = located.expand(located.owned_parts(shard.master))
        for key in ("exp_avg", "exp_avg_sq"):
            to_sum[f"{name} {key}"] = located.expand(optimizer.state_values(shard, located.index, key))
        # Each rank with a part of the parameter has the count of its steps.
        counts = [value.item() for _, value in optimizer.state_values(shard, located.index, "step")]
        assert len(set(counts)) <= 1, f"{name}: {counts}"
        to_sum[f"{name} step"] = torch.tensor([counts[0], 1.0] if counts else [0.0, 0.0])
    summed = torch.cat([value.flatten() for value in to_sum.values()])
    engine._parts.replica_group.all_reduce(summed)
    pieces = summed.split([value.numel() for value in to_sum.values()])
    for (name, value), piece in zip(to_sum.items(), pieces, strict=True):
        states[name] = piece[0] / piece[1].clamp(min=1.0) if name.endswith(" step") else piece.view(value.shape)
    return states
