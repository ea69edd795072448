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
from zeroengine.optim.backends.async_update import AsyncUpdate
from zeroengine.optim.backends.blocking_update import BlockingUpdate
from zeroengine.optim.backends.fused_update import FusedUpdate
from zeroengine.optim.backends.interface import BackendParts, UpdateBackend, UpdateRule
from zeroengine.optim.backends.muon_update import MuonUpdate
from zeroengine.optim.backends.torch_update import ElementwiseUpdate, WholeUpdate
from zeroengine.optim.elementwise import is_elementwise
from zeroengine.optim.fused_rules import FUSED_NAMES, fused_rule_of
from zeroengine.optim.mixed_optimizer import members_of
from zeroengine.optim.muon import Muon
from zeroengine.partition.cut import UnitPlan

# The rules that update states which are not on the device.
OFFLOADABLE = (FusedUpdate, MuonUpdate)
FUSED = f"{', '.join(FUSED_NAMES[:-1])} and {FUSED_NAMES[-1]}"


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
        async_step: Whether to choose ``AsyncUpdate`` where it can run. None: on a GPU that zeroengine's kernels serve.
        degree: The largest degree of the optimizer's states.

    Raises:
        ZeroEngineError: A rule cannot keep states in fewer bits than fp32, or not outside the device's memory.
    """
    trainable = [pair for pair in zip(plans, placement.parameter_shards, strict=True) if pair[0].trainable]
    on_device = all(store is None for store in (*placement.optimizer_stores, *(stored for _, stored in trainable)))
    members, rules = members_of(optimizer), rules_of(optimizer, plans, degree)
    if config.ema is not None and not _has_fused_dtypes(plans):
        dtypes = sorted({str(plan.dtype) for plan, _ in trainable if plan.dtype not in FLOATS.values()})
        raise ZeroEngineError(
            f"ema: averages are of parameters in fp32, bf16 and fp16, and this model has some in {', '.join(dtypes)}; "
            'convert them, such as by model.float(), or write "ema": null'
        )
    coarse = ["moments of 8 bits"] if config.state_dtype is torch.uint8 else []
    coarse += ["parameters without fp32 masters"] if config.has_low_masters else []
    if coarse and config.local_steps is not None:
        raise ZeroEngineError(
            f"local_steps: replicas are averaged, and {' and '.join(coarse)} would round each mean to nearest, which "
            'loses small changes; leave these formats out ("optimizer_state_dtype": "bf16" is possible)'
        )
    if rules == [FusedUpdate] and trainable and on_device:
        if ops.cuda_library(device) is not None if async_step is None else async_step:
            return AsyncUpdate
    for member, rule in zip(members, rules, strict=True):
        name = _name_beside_fused(member, plans)
        if rule is not FusedUpdate and config.state_dtype is not torch.float32:
            raise ZeroEngineError(
                f"optimizer_state_dtype: {FUSED} of parameters in fp32, bf16 and fp16 "
                f"keep moments in bf16 and int8, not {name}; leave the key out"
            )
        if rule is not FusedUpdate and config.has_low_masters:
            raise ZeroEngineError(
                f"bf16_master_weights_and_grads and fp16_master_weights_and_grads: {FUSED} update parameters without "
                f"fp32 masters, not {name}; remove the key"
            )
        # A GPU updates no parameter shard that is elsewhere by a rule that is not fused: the pipeline does.
        by_pipeline = rule in OFFLOADABLE and _has_fused_dtypes(plans) and placement.pipeline is not None
        if not (on_device or by_pipeline or rule is FusedUpdate):
            raise ZeroEngineError(
                f'offload: {FUSED} (and Muon with "offload_optimizer") of parameters in fp32, bf16 and fp16 update '
                f'states that are not on the device, not {name}; write "device": "none"'
            )
        if rule is WholeUpdate and config.local_steps is not None:
            raise ZeroEngineError(
                f"local_steps: states of {name} belong to whole parameters, and replicas cannot average them. Use an "
                "optimizer with a value of each element, such as AdamW or Muon."
            )
    return partial(BlockingUpdate, rules=rules)


def can_offload(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether states of ``optimizer`` may be offloaded where the kernels know the dtypes of all parameters."""
    return all(rule_of(member, has_fused_dtypes=True, degree=1) in OFFLOADABLE for member in members_of(optimizer))


def rules_of(optimizer: torch.optim.Optimizer, plans: Sequence[UnitPlan], degree: int) -> list[type[UpdateRule]]:
    """Return the rule of each algorithm, in the order of ``members_of``.

    Args:
        optimizer: The optimizer.
        plans: The units.
        degree: The largest degree of the optimizer's states.
    """
    known = _has_fused_dtypes(plans)
    return [rule_of(member, has_fused_dtypes=known, degree=degree) for member in members_of(optimizer)]


def _name_beside_fused(optimizer: torch.optim.Optimizer, plans: Sequence[UnitPlan]) -> str:
    """Return the class of an optimizer, and what makes it another one than the fused one of that name."""
    name = type(optimizer).__name__
    if name not in FUSED_NAMES:
        return name
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        return f"{name} with amsgrad"
    return f"{name} of {type(optimizer).__module__}" if _has_fused_dtypes(plans) else f"{name} of other dtypes"


def _has_fused_dtypes(plans: Sequence[UnitPlan]) -> bool:
    return all(plan.dtype in FLOATS.values() for plan in plans if plan.trainable)


def rule_of(optimizer: torch.optim.Optimizer, *, has_fused_dtypes: bool, degree: int) -> type[UpdateRule]:
    """Return the rule that updates as ``optimizer`` does, which has one algorithm.

    Args:
        optimizer: The optimizer. ``check_optimizer`` refuses those that no rule serves.
        has_fused_dtypes: Whether the fused kernels know the dtypes of all parameters that are trained.
        degree: The largest degree of the optimizer's states.
    """
    if has_fused_dtypes and fused_rule_of(optimizer) is not None:
        return FusedUpdate
    # A subclass may update in another way. torch wraps every class's step in a profiling hook.
    if inspect.unwrap(type(optimizer).step) is inspect.unwrap(Muon.step):
        return MuonUpdate
    # Where every rank has all of a unit, parameters are whole in the shards.
    return ElementwiseUpdate if degree == 1 or is_elementwise(optimizer) else WholeUpdate
