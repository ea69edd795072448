"""Choose the backend that updates as the caller's optimizer does, before anything is partitioned."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial

import torch

from zeroengine import ops
from zeroengine.config import FLOATS, Config
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.placement import Placement
from zeroengine.optim.backends.adam_state import has_adam_rule
from zeroengine.optim.backends.adam_update import AdamUpdate
from zeroengine.optim.backends.async_adam import AsyncAdam
from zeroengine.optim.backends.blocking_update import BlockingUpdate
from zeroengine.optim.backends.interface import BackendParts, UpdateBackend, UpdateRule
from zeroengine.optim.backends.muon_update import MuonUpdate
from zeroengine.optim.backends.torch_update import ElementwiseUpdate, WholeUpdate
from zeroengine.optim.elementwise import is_elementwise
from zeroengine.optim.mixed_optimizer import members_of
from zeroengine.optim.muon import Muon
from zeroengine.partition.cut import UnitPlan

# The rules that update states which are not on the device.
OFFLOADABLE = (AdamUpdate, MuonUpdate)


def choose_backend(
    optimizer: torch.optim.Optimizer,
    plans: Sequence[UnitPlan],
    placement: Placement,
    config: Config,
    device: torch.device,
    async_step: bool | None,
    degree: int,
) -> Callable[[BackendParts], UpdateBackend]:
    """Return what makes the backend that updates the states of ``plans`` where ``placement`` has them.

    Args:
        optimizer: The caller's optimizer, whose class says how to update.
        plans: The units.
        placement: Where their states are.
        config: The resolved configuration.
        device: The device that the model computes on.
        async_step: Whether to choose ``AsyncAdam`` where it can run. None: on a GPU that zeroengine's kernels serve.
        degree: The largest degree of the optimizer's states.

    Raises:
        ZeroEngineError: A rule cannot keep states in bf16, or not outside the device's memory.
    """
    trainable = [pair for pair in zip(plans, placement.parameter_shards, strict=True) if pair[0].trainable]
    on_device = all(store is None for store in (*placement.optimizer_stores, *(stored for _, stored in trainable)))
    members, rules = members_of(optimizer), rules_of(optimizer, plans, degree)
    if rules == [AdamUpdate] and trainable and on_device:
        if ops.cuda_library(device) is not None if async_step is None else async_step:
            return AsyncAdam
    for member, rule in zip(members, rules, strict=True):
        name = type(member).__name__
        if rule is not AdamUpdate and FLOATS[config.optimizer_state_dtype] is not torch.float32:
            raise ZeroEngineError(
                f"optimizer_state_dtype: only Adam and AdamW on fp32 masters keep moments in bf16, not {name}; remove "
                "the key"
            )
        # A GPU updates no parameter shard that is elsewhere by another rule than Adam's: the pipeline does.
        by_pipeline = rule in OFFLOADABLE and _has_fp32_masters(plans) and placement.pipeline is not None
        if not (on_device or by_pipeline or rule is AdamUpdate):
            raise ZeroEngineError(
                'offload: only Adam and AdamW (and Muon with "offload_optimizer") on fp32 masters update states that '
                f'are not on the device, not {name}; write "device": "none"'
            )
        if rule is WholeUpdate and config.local_steps is not None:
            raise ZeroEngineError(
                f"local_steps: states of {name} belong to whole parameters, and replicas cannot average them. Use an "
                "optimizer with a value of each element, such as AdamW or Muon."
            )
    return partial(BlockingUpdate, rules=rules)


def can_offload(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether states of ``optimizer`` may be offloaded where all masters are fp32."""
    return all(rule_of(member, fp32_masters=True, degree=1) in OFFLOADABLE for member in members_of(optimizer))


def rules_of(optimizer: torch.optim.Optimizer, plans: Sequence[UnitPlan], degree: int) -> list[type[UpdateRule]]:
    """Return the rule of each algorithm, in the order of ``members_of``.

    Args:
        optimizer: The optimizer.
        plans: The units.
        degree: The largest degree of the optimizer's states.
    """
    fp32_masters = _has_fp32_masters(plans)
    return [rule_of(member, fp32_masters=fp32_masters, degree=degree) for member in members_of(optimizer)]


def _has_fp32_masters(plans: Sequence[UnitPlan]) -> bool:
    return all(plan.is_mixed_precision or plan.dtype is torch.float32 for plan in plans if plan.trainable)


def rule_of(optimizer: torch.optim.Optimizer, *, fp32_masters: bool, degree: int) -> type[UpdateRule]:
    """Return the rule that updates as ``optimizer`` does, which has one algorithm.

    Args:
        optimizer: The optimizer. ``check_optimizer`` refuses those that no rule serves.
        fp32_masters: Whether all masters are fp32.
        degree: The largest degree of the optimizer's states.
    """
    if has_adam_rule(optimizer) and fp32_masters:
        return AdamUpdate
    # A subclass may update in another way. torch wraps every class's step in a profiling hook.
    if inspect.unwrap(type(optimizer).step) is inspect.unwrap(Muon.step):
        return MuonUpdate
    # Where every rank has all of a unit, parameters are whole in the shards.
    return ElementwiseUpdate if degree == 1 or is_elementwise(optimizer) else WholeUpdate
