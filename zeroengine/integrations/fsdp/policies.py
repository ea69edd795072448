"""From the arguments of ``fully_shard`` to a configuration."""

from __future__ import annotations

import re
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from zeroengine.errors import ZeroEngineError

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# The loss scale of torch.amp.GradScaler, which FSDP2 scripts use in fp16: it starts at 65536, each overflow halves it,
# and 2000 steps without one double it.
GRAD_SCALER = {"initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
# Where no reduce_dtype is given, FSDP2 reduces in the parameters' own dtype, and before torch 2.15 in param_dtype.
REDUCES_IN_OWN_DTYPE = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 15)

# The arguments of fully_shard that no key stands for.
WITHOUT_COUNTERPART = {
    "shard_placement_fn": "each rank owns a slice of a unit's flat buffer here, whatever the parameters' shapes. Leave "
    "shard_placement_fn out",
    "ignored_params": "the engine partitions every parameter of the model that it gets. Freeze them with "
    "param.requires_grad_(False), or pass initialize() a module without them; then leave ignored_params out",
    "dp_mesh_dims": "there is data parallelism alone, without tensor, pipeline or sequence parallelism. Leave "
    'dp_mesh_dims out, and pass the data-parallel dimension: initialize(..., process_group=mesh["dp"])',
}


def config_of_policies(
    model: nn.Module | None = None,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: object = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: object = None,
    dp_mesh_dims: object = None,
    gradient_accumulation_steps: int | Literal["manual"] = 1,
) -> dict[str, Any]:
    """Return the configuration that trains as ``fully_shard`` with these arguments does.

    The arguments are those of ``fully_shard``, with the same defaults, and ``gradient_accumulation_steps``. Pass those
    of the root module. For modules that ``fully_shard`` gives other policies, add ``"units"`` and
    ``"keep_fp32_modules"``.

    Args:
        model: The plain model. Its dtype tells whether low precision has fp32 master weights. None: it is fp32.
        mesh: A mesh of one dimension, or of two for hybrid sharding (HSDP), which gives ``degrees``. ``initialize``
            takes it as ``process_group=mesh``.
        reshard_after_forward: None and True give stage 3, False gives stage 2. A number of ranks gives
            ``degrees.secondary_parameters``.
        shard_placement_fn: Has no counterpart.
        mp_policy: The dtypes of parameters and of gradient reduction.
        offload_policy: ``CPUOffloadPolicy`` offloads parameters and optimizer state to CPU memory.
        ignored_params: Has no counterpart.
        dp_mesh_dims: Has no counterpart.
        gradient_accumulation_steps: The number of backwards before each ``optimizer.step()`` of the script, or
            ``"manual"`` where it varies. Above 1 the configuration says ``"manual"``: the script divides its loss
            already, as FSDP2 does not.

    Returns:
        The configuration as JSON types, for ``initialize`` or a file. It names no optimizer and no batch size.

    Raises:
        ZeroEngineError: A setting has no counterpart. The message says what to write instead.
    """
    if isinstance(model, FSDPModule):
        raise ZeroEngineError(
            "config_of_policies(): fully_shard was applied to this model. Pass the plain model, and the arguments that "
            "fully_shard got"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise ZeroEngineError(f"config_of_policies() takes a torch.nn.Module, found {type(model).__name__}")
    for name, value in (
        ("shard_placement_fn", shard_placement_fn),
        ("ignored_params", ignored_params or None),
        ("dp_mesh_dims", dp_mesh_dims),
    ):
        if value is not None:
            raise ZeroEngineError(f"{name}: {WITHOUT_COUNTERPART[name]}")
    steps = gradient_accumulation_steps
    if steps != "manual" and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ZeroEngineError(
            f'gradient_accumulation_steps: found {steps!r}; write the number of backwards before an update, or "manual"'
        )
    return {
        "zero_optimization": {
            **_partition_keys(reshard_after_forward, mesh),
            **_offload_keys(offload_policy or OffloadPolicy(), reshard_after_forward),
        },
        **_precision_keys(mp_policy or MixedPrecisionPolicy(), _dtype_of(model)),
        "gradient_accumulation_steps": 1 if steps == 1 else "manual",
    }


def _partition_keys(reshard_after_forward: bool | int | None, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Return the keys of ``zero_optimization`` that partition and release parameters as ``fully_shard`` does.

    Args:
        reshard_after_forward: As of ``fully_shard``. A number is the number of ranks that parameters are partitioned
            over between forward and backward.
        mesh: As of ``fully_shard``.

    Raises:
        ZeroEngineError: The mesh has more than two dimensions, or ``reshard_after_forward`` is something else.
    """
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, int)):
        raise ZeroEngineError(
            f"reshard_after_forward: found {reshard_after_forward!r}; write True, which is stage 3, or False, stage 2"
        )
    if mesh is not None and mesh.ndim > 2:
        raise ZeroEngineError(
            f"mesh: found {mesh.ndim} dimensions. Pass the data-parallel ones: one, or two for hybrid sharding "
            '(HSDP), such as mesh["replicate", "shard"]'
        )
    world_size = mesh.size() if mesh is not None else dist.get_world_size() if dist.is_initialized() else None
    # The number of ranks that states are partitioned over; None: all ranks.
    shard_ranks = mesh.size(1) if mesh is not None and mesh.ndim == 2 else None
    # FSDP2 treats these two numbers as False and True.
    if reshard_after_forward in (1, shard_ranks or world_size) and not isinstance(reshard_after_forward, bool):
        reshard_after_forward = reshard_after_forward != 1
    partitioned = "gradients" if reshard_after_forward is False else "parameters"
    degrees: dict[str, Any] = {}
    if shard_ranks is not None:
        degrees[partitioned] = shard_ranks
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        degrees = {"parameters": shard_ranks or "all", "secondary_parameters": reshard_after_forward}
    return {"degrees": degrees} if degrees else {"stage": 2 if partitioned == "gradients" else 3}


def _offload_keys(policy: OffloadPolicy, reshard_after_forward: bool | int | None) -> dict[str, Any]:
    """Return the keys of ``zero_optimization`` that keep states where the policy says.

    Raises:
        ZeroEngineError: Parameters would be offloaded at stage 2, or the policy is of an unknown class, such as
            FSDP1's ``CPUOffload``.
    """
    if isinstance(policy, CPUOffloadPolicy):
        if reshard_after_forward is False or reshard_after_forward == 1:
            raise ZeroEngineError(
                "CPUOffloadPolicy offloads parameters, and with reshard_after_forward=False (stage 2) they stay "
                "gathered. Write reshard_after_forward=True, or leave offload_policy out and offload the optimizer's "
                'state alone: {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'
            )
        place = {"device": "cpu", "pin_memory": policy.pin_memory}
        return {"offload_param": place, "offload_optimizer": dict(place)}
    if type(policy) is not OffloadPolicy:
        raise ZeroEngineError(
            f"offload_policy: found {type(policy).__name__}, which is neither OffloadPolicy nor CPUOffloadPolicy of "
            'torch.distributed.fsdp. Write one of these, or the place yourself: {"zero_optimization": '
            '{"offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}}'
        )
    return {}


def _precision_keys(policy: MixedPrecisionPolicy, model_dtype: torch.dtype) -> dict[str, Any]:
    """Return the keys of a configuration that compute and reduce in the dtypes of the policy.

    Args:
        policy: The policy of the whole model.
        model_dtype: The dtype of the model's parameters, in which FSDP2 updates them.

    Raises:
        ZeroEngineError: The policy has no counterpart, or is of another class, such as FSDP1's ``MixedPrecision``.
    """
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ZeroEngineError(
            f"mp_policy: found {type(policy).__name__}; write a MixedPrecisionPolicy of torch.distributed.fsdp, such "
            "as MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    compute_dtype = policy.param_dtype or model_dtype
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and dtype not in NAMES:
            raise ZeroEngineError(
                f"MixedPrecisionPolicy: found {name}={dtype}; write torch.float32, torch.bfloat16 or torch.float16"
            )
    if policy.output_dtype not in (None, compute_dtype):
        raise ZeroEngineError(
            f"MixedPrecisionPolicy: found output_dtype={policy.output_dtype}. The engine returns the model's outputs "
            "as they are: leave output_dtype out, and cast them in the loop, such as "
            f"engine(batch).to({policy.output_dtype})"
        )
    is_mixed = compute_dtype != model_dtype
    if is_mixed and not policy.cast_forward_inputs:
        raise ZeroEngineError(
            "MixedPrecisionPolicy: found cast_forward_inputs=False. The engine casts floating-point inputs of the "
            f"model to {compute_dtype}: leave cast_forward_inputs out. Inputs inside an object of your own class stay "
            "as they are"
        )
    if is_mixed and model_dtype is not torch.float32:
        raise ZeroEngineError(
            f"MixedPrecisionPolicy: found param_dtype={policy.param_dtype} for parameters of {model_dtype}. Mixed "
            "precision starts from an fp32 model: write model.float(), or leave param_dtype out"
        )
    keys: dict[str, Any] = {}
    # A model that has this dtype already is updated in it by FSDP2, without fp32 master weights. So is it here where
    # mixed precision is not enabled.
    if is_mixed:
        section = {"enabled": True} | (GRAD_SCALER if compute_dtype is torch.float16 else {})
        keys[NAMES[compute_dtype]] = section
    reduce_dtype = policy.reduce_dtype or (model_dtype if is_mixed and REDUCES_IN_OWN_DTYPE else compute_dtype)
    if reduce_dtype is not compute_dtype:
        keys["communication_data_type"] = NAMES[reduce_dtype]
    # FSDP2 keeps the reduced gradient in the dtype of the parameters, without rounding it to the compute dtype.
    if is_mixed and reduce_dtype is torch.float32:
        keys["data_types"] = {"grad_accum_dtype": "fp32"}
    return keys


def _dtype_of(model: nn.Module | None) -> torch.dtype:
    """Return the dtype of the model's trainable parameters, or fp32 without a model.

    Raises:
        ZeroEngineError: They have several.
    """
    params = list(model.parameters()) if model is not None else []
    trainable = {param.dtype for param in params if param.requires_grad and param.is_floating_point()}
    if len(trainable) > 1:
        found = ", ".join(sorted(map(str, trainable)))
        raise ZeroEngineError(
            f"the model's trainable parameters have several dtypes: {found}. Give them one, such as model.float(), and "
            'name the modules that compute in fp32: {"keep_fp32_modules": ["*norm*"]}'
        )
    return trainable.pop() if trainable else torch.float32
