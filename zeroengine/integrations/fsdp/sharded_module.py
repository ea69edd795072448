"""From a model that ``fully_shard`` was applied to, to a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.fsdp.policies import (
    Accumulation,
    accumulation_keys,
    dtype_of,
    offload_keys,
    partition_keys,
    precision_keys,
)


@dataclass(frozen=True)
class ShardedModule:
    """What ``fully_shard`` was told of one module."""

    name: str  # qualified, "" for the root
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    reshard_after_forward: bool | int | None
    shard_ranks: int | None  # that parameters are partitioned over, where they are replicated as well


def config_of_module(model: nn.Module, *, gradient_accumulation_steps: Accumulation = 1) -> dict[str, Any]:
    """Return the configuration that trains as this model does, which ``fully_shard`` was applied to.

    ``initialize`` takes the plain model, so build the model a second time, or read the settings of one on the meta
    device, which needs no memory. The configuration has:

    - the stage: 3 unless ``reshard_after_forward`` is False for every module; or degrees, where a mesh has two
      dimensions (HSDP);
    - the modules that ``fully_shard`` was applied to, as units, also nested ones;
    - precision, with modules that compute in fp32 as ``keep_fp32_modules``;
    - offload.

    Args:
        model: The root module.
        gradient_accumulation_steps: As of ``config_of_policies``.

    Raises:
        ZeroEngineError: A setting has no counterpart, or ``fully_shard`` was not applied to ``model``.
    """
    if not isinstance(model, nn.Module):
        raise ZeroEngineError(f"config_of_module() takes a torch.nn.Module, found {type(model).__name__}")
    modules = [_read(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ZeroEngineError(
            "config_of_module(): fully_shard was not applied to this model. Apply it first, or write "
            "config_of_policies(mp_policy=..., offload_policy=..., reshard_after_forward=...)"
        )
    reshard = _resharding(modules)
    config: dict[str, Any] = {"zero_optimization": partition_keys(reshard, _shard_ranks(modules), None)}
    config["zero_optimization"] |= offload_keys(_same_offload(modules), reshard)
    config |= _precision_keys(model, modules)
    if names := [module.name for module in modules if module.name]:
        config["units"] = _shortened(model, names)
    return config | accumulation_keys(gradient_accumulation_steps)


def _read(name: str, module: FSDPModule) -> ShardedModule:
    """Read what ``fully_shard`` keeps of its arguments, which torch has no public function for."""
    try:
        state: Any = module._get_fsdp_state()
        groups: Sequence[Any] = state._fsdp_param_groups
        policy, is_auto = state._mp_policy, state._auto_reshard_after_forward
        offload_policies = [group.offload_policy for group in groups]
        resharding = [(group.mesh_info, group.post_forward_mesh_info) for group in groups]
        replicated = [mesh.replicate_mesh_dim is not None for mesh, _ in resharding]
        sharded = all(mesh.shard_mesh_dim is not None for mesh, _ in resharding)
        sizes = [(mesh.shard_mesh_size, after and after.shard_mesh_size) for mesh, after in resharding if sharded]
    except AttributeError as error:
        raise ZeroEngineError(
            f"config_of_module(): torch {torch.__version__} keeps the settings of fully_shard elsewhere ({error}). "
            "Write config_of_policies(mp_policy=..., offload_policy=..., reshard_after_forward=...)"
        ) from error
    if not sharded:
        where = f"the module {name}" if name else "the model"
        raise ZeroEngineError(
            f"{where} is replicated and not partitioned. For replicate(...) write "
            '{"zero_optimization": {"stage": 0}}'
        )
    reshard: bool | int | None = None
    # FSDP2 keeps the root's parameters gathered unless told otherwise, so its own choice says nothing of the model.
    if not is_auto and sizes:
        size, after = sizes[0]
        reshard = False if after is None else True if after == size else after
    offload_policy = offload_policies[0] if offload_policies else OffloadPolicy()
    return ShardedModule(name, policy, offload_policy, reshard, sizes[0][0] if any(replicated) else None)


def _resharding(modules: Sequence[ShardedModule]) -> bool | int | None:
    """Return one ``reshard_after_forward`` for all modules: the one that releases parameters, if they differ."""
    found = [module.reshard_after_forward for module in modules if module.name or len(modules) == 1]
    numbers = sorted({value for value in found if value is not None and not isinstance(value, bool)})
    if len(numbers) > 1:
        raise ZeroEngineError(
            f"reshard_after_forward: modules have {' and '.join(map(str, numbers))}. There is one number for the whole "
            "model here: give all modules the same"
        )
    if numbers:
        return numbers[0]
    return False if all(value is False for value in found) else None


def _shard_ranks(modules: Sequence[ShardedModule]) -> int | None:
    """Return the number of ranks that all modules are partitioned over, where they are replicated as well."""
    # A module without parameters of its own tells nothing.
    sizes = {module.shard_ranks for module in modules if module.shard_ranks is not None}
    if len(sizes) > 1:
        raise ZeroEngineError(
            f"mesh: modules are partitioned over {' and '.join(map(str, sorted(sizes)))} ranks. Give all of them the "
            "same mesh"
        )
    return sizes.pop() if sizes else None


def _same_offload(modules: Sequence[ShardedModule]) -> OffloadPolicy:
    first = modules[0]
    for module in modules:
        if module.offload_policy != first.offload_policy:
            raise ZeroEngineError(
                f"offload_policy: {first.name or 'the model'} has {first.offload_policy}, and {module.name} has "
                f"{module.offload_policy}. Offload is the same for the whole model here: give all modules one policy, "
                'or write "offload_optimizer": {"device": "cpu", "ratio": 0.5} for a part of the optimizer state'
            )
    return first.offload_policy


def _precision_keys(model: nn.Module, modules: Sequence[ShardedModule]) -> dict[str, Any]:
    """Return the keys of the policy that most parameters have, and name the modules that compute in fp32 instead."""
    policies = {module.name: module.mp_policy for module in modules}
    model_dtype = dtype_of(model)
    # The nearest module above a parameter, or its own module, decides.
    owners: dict[str, MixedPrecisionPolicy] = {}
    elements: dict[MixedPrecisionPolicy, int] = {}
    for name, module in model.named_modules():
        path = name.split(".") if name else []
        above = (".".join(path[:length]) for length in range(len(path), -1, -1))
        policy = next((policies[prefix] for prefix in above if prefix in policies), None)
        params = list(module.parameters(recurse=False))
        if policy is not None and params:
            owners[name] = policy
            elements[policy] = elements.get(policy, 0) + sum(param.numel() for param in params)
    main = max(elements, key=lambda policy: elements[policy])
    config = precision_keys(main, model_dtype)
    low = main.param_dtype or model_dtype
    fp32_modules = []
    for name, policy in owners.items():
        if policy == main:
            continue
        # Without mixed precision the model computes in one dtype.
        is_mixed = low is not model_dtype
        computes_in_fp32 = (policy.param_dtype or model_dtype) is torch.float32
        if not (is_mixed and computes_in_fp32 and name and policy.output_dtype in (None, low)):
            raise ZeroEngineError(
                f"mp_policy: {name or 'the model itself'} has {policy}, and most parameters have {main}. Modules may "
                f"differ by computing in fp32 alone, with outputs in {low}: write MixedPrecisionPolicy(output_dtype="
                f"{low}) there, or give all modules one policy"
            )
        fp32_modules.append(name)
    if fp32_modules:
        config["keep_fp32_modules"] = fp32_modules
    return config


def _shortened(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return patterns of the modules, with ``blocks.*`` in place of all children of ``blocks``."""
    patterns: list[str] = []
    for name in names:
        parent = name.rpartition(".")[0]
        siblings = [f"{parent}.{child}" for child, _ in model.get_submodule(parent).named_children()] if parent else []
        pattern = f"{parent}.*" if len(siblings) > 1 and set(siblings) <= set(names) else name
        if pattern not in patterns:
            patterns.append(pattern)
    return patterns
