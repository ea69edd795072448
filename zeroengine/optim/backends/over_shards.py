"""The caller's optimizer over this rank's shards: a copy whose parameters are views of the master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from zeroengine.disk.mapped_memory import populate
from zeroengine.optim.backends.interface import BackendParts
from zeroengine.optim.caller_optimizer import copy_attributes, copy_without_parameters
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.layout import ShardSpan

T = TypeVar("T")


class ShardParameter(NamedTuple):
    """The part of a parameter that is in this rank's shard, as a parameter of its own."""

    shard: OptimizerShard
    span: ShardSpan
    param: torch.nn.Parameter


class OptimizerOverShards:
    """Runs code of the caller's optimizer on this rank's shards.

    Hyperparameters and plain attributes are those of the caller's optimizer, which schedules and users change: they are
    copied before each run, and back after it, because some optimizers count or adapt in them.

    Attributes:
        optimizer: The copy. Its state belongs to these parameters.
        params: For each shard, by its index and that of a parameter in its unit, what the copy updates.
    """

    def __init__(self, parts: BackendParts) -> None:
        self._caller = parts.base_optimizer
        self.optimizer = copy_without_parameters(parts.base_optimizer)
        self.params: dict[int, dict[int, ShardParameter]] = {shard.index: {} for shard in parts.shards}
        for shard in parts.shards:
            for span in shard.spans():
                original = shard.unit.params[span.param_index]
                # A parameter that lies wholly in this shard keeps its shape, because some optimizers use it.
                shape = original.shape if span.numel == original.numel() else (span.numel,)
                param = torch.nn.Parameter(shard.master[span.shard_slice].view(shape))
                self.optimizer.param_groups[parts.group_of_param[original]]["params"].append(param)
                self.params[shard.index][span.param_index] = ShardParameter(shard, span, param)

    def __iter__(self) -> Iterator[ShardParameter]:
        """Yield the parameters of all shards."""
        for params in self.params.values():
            yield from params.values()

    def step(self, factor: float, has_grad: Sequence[Sequence[bool]]) -> None:
        """Let the copy take a step. See ``UpdateRule.update``."""
        for shard, span, param in self:
            # The optimizer skips a parameter without a gradient, as in plain torch.
            if has_grad[shard.index][span.param_index]:
                gradient = shard.gradient[span.shard_slice]
                param.grad = gradient.to(param.dtype, copy=True).mul_(factor).view_as(param)
        self.run(lambda optimizer: optimizer.step())
        # The copies of the gradients would take memory until the next step.
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, act: Callable[[torch.optim.Optimizer], T]) -> T:
        """Return what ``act`` returns of the copy, with the caller's present settings."""
        try:
            return run_with_settings(self._caller, self.optimizer, act)
        finally:
            for shard, span, param in self:
                master = shard.master[span.shard_slice]
                if param.data_ptr() != master.data_ptr():
                    # The optimizer assigned to ``data``, and the new memory is no part of the shard.
                    populate(master, write=True)
                    master.copy_(param.detach().view(-1))
                    param.data = master.view(param.shape)


def run_with_settings(
    caller: torch.optim.Optimizer, copied: torch.optim.Optimizer, act: Callable[[torch.optim.Optimizer], T]
) -> T:
    """Return what ``act`` returns of a copy of the caller's optimizer, with the caller's present settings.

    Args:
        caller: The caller's optimizer. It takes over what ``act`` changes.
        copied: The copy, with as many groups.
        act: Runs code of the optimizer.
    """
    groups = list(zip(copied.param_groups, caller.param_groups, strict=True))
    for group, caller_group in groups:
        group.update(_hyperparameters(caller_group))
    copy_attributes(caller, copied)
    try:
        return act(copied)
    finally:
        # Checkpoints save the caller's groups, and users read its attributes.
        for group, caller_group in groups:
            caller_group.update(_hyperparameters(group))
        copy_attributes(copied, caller)


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
