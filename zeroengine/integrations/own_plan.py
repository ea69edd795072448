"""Splits a model of transformers by its own plans of tensor and expert parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from zeroengine.errors import ZeroEngineError


def split_by_own_plan(
    model: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh, num_ranks: int, *, parameters_alone: bool = False
) -> dict[str, str]:
    """Split layers and experts of ``model`` as ``from_pretrained(distributed_config=...)`` does, in place.

    That call would leave no ranks for the data, unless they shard the parameters by FSDP2 as well.

    Args:
        model: The model, whole.
        mesh: The ranks that layers are split over. One rank: they are not split.
        expert_mesh: The ranks that experts are split over. One rank: they are not split.
        num_ranks: The ranks of the job.
        parameters_alone: Whether only the parameters are split, and the model cannot compute. On the meta device no
            process group is needed then.

    Returns:
        The styles of modules and parameters, by name.

    Raises:
        ZeroEngineError: ``model`` has no plan, or transformers refuses it.
    """
    kind, size, expert_size = type(model).__name__, mesh.size(), expert_mesh.size()
    if size > 1 and not getattr(model, "tp_plan", None):
        raise ZeroEngineError(
            f"{kind} has no plan of tensor parallelism (base_model_tp_plan). Write one: zeroengine.parallelize(model, "
            '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}, size=2), before initialize().'
        )
    if expert_size > 1 and not getattr(model, "ep_plan", None):
        raise ZeroEngineError(
            f"{kind} has no plan of expert parallelism (base_model_ep_plan): leave expert_parallel and expert_size out"
        )
    split: Any = model
    if getattr(model, "peft_config", None):
        raise ZeroEngineError(
            f"{kind} has adapters of peft, whose names are not those of the plan: name layers and adapters in one of "
            'your own, such as zeroengine.parallelize(model, {"*.up_proj.base_layer": "colwise", "*.up_proj.lora_B.*": '
            '"colwise", ...}, size=2), before initialize() (docs/tensor-parallelism.md, Adapters)'
        )
    _check_heads(split.config.get_text_config(), kind, size)
    try:
        config = DistributedConfig(tp_size=size, ep_size=expert_size, fsdp_size=num_ranks // size)
        plan, expert_plan, _ = split._resolve_parallel_plans(config)
        styles: dict[str, str] = plan | expert_plan
        # transformers takes the slices from each rank's own values.
        _take_values_of_rank_0(model, torch.device(mesh.device_type))
        _untie(model)
        if parameters_alone:
            names = dict(model.named_parameters())
            plan, expert_plan = ({name: own[name] for name in own if name in names} for own in (plan, expert_plan))
        if size > 1:
            apply_tensor_parallelism(model, mesh, plan)
        if expert_size > 1:
            apply_expert_parallelism(model, expert_mesh, mesh, expert_plan)
    except (ValueError, KeyError, NotImplementedError) as error:
        over = f"{size} ranks" if expert_size == 1 else f"{size} and its experts over {expert_size} ranks"
        raise ZeroEngineError(
            f"{kind} cannot be split over {over} by its own plan: {type(error).__name__}: {error}"
        ) from error
    split.tie_weights()
    return styles


def _check_heads(config: Any, kind: str, size: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (count := getattr(config, name, None) or size) % size:
            raise ZeroEngineError(
                f"{kind} has {name} of {count}, which cannot be split over {size} ranks: write a number of ranks that "
                "divides it"
            )


def _take_values_of_rank_0(model: nn.Module, device: torch.device) -> None:
    """Give all ranks the values of rank 0. A collective.

    Args:
        model: The model, on any device.
        device: That of the ranks' collectives.
    """
    for param in model.parameters():
        # What has no values yet has those of rank 0 later.
        if param.is_meta:
            continue
        values = param.detach().to(device).contiguous()
        dist.broadcast(values.view(-1).view(torch.uint8), src=0)
        param.detach().copy_(values)


def _untie(model: nn.Module) -> None:
    """Give each name of a tied parameter a parameter of its own, with the same memory: the plan names all of them."""
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for key, param in module.named_parameters(recurse=False):
            if param in seen:
                setattr(module, key, nn.Parameter(param.detach(), param.requires_grad))
            seen.add(param)
