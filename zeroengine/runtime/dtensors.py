"""Parameters that are ``DTensor``s: the only part of torch's tensor parallelism that the runtime touches.

A parameter that the model's library has split is a ``DTensor`` with a plain tensor inside, its slice. The parameter
stays the same object: what is gathered, released and updated is the tensor inside.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zeroengine.deferred_init.parameter import swap_data, trace_of
from zeroengine.errors import ZeroEngineError
from zeroengine.partition.slices import SLICE_ATTRIBUTE, make_slice, slice_of
from zeroengine.utils.torch_internals import DTENSOR_SPEC, LOCAL_TENSOR

# The names of the dimension of a mesh that experts are split over.
EXPERT_DIMENSIONS = ("ep", "experts")


def dtensors_in(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a model that are ``DTensor``s, with their names."""
    tensors = sys.modules.get("torch.distributed.tensor")
    # If this module was never imported, no DTensor exists. Importing it only to look would take time.
    if tensors is not None:
        yield from ((name, p) for name, p in model.named_parameters() if isinstance(p, tensors.DTensor))


def of_experts(mesh: Any) -> bool:
    """Return whether a mesh is one that experts are split over."""
    return (mesh.mesh_dim_names or ("",))[0] in EXPERT_DIMENSIONS


class SplitOver(NamedTuple):
    """The ranks of the engine that parameters are split over, in the order of their slices; None: none is split.

    Attributes:
        model: The ranks that compute each sample together.
        experts: Those that have the experts together.
    """

    model: tuple[int, ...] | None = None
    experts: tuple[int, ...] | None = None


def note_slices(model: nn.Module, process_group: dist.ProcessGroup | None, undo: ExitStack) -> SplitOver:
    """Note for each parameter that is split which part of it this rank has.

    A mesh of experts has the dimension ``ep`` or ``experts``.

    Args:
        model: The model.
        process_group: The ranks of the engine; None: all.
        undo: Forgets it again.

    Returns:
        The ranks that the parameters are split over.

    Raises:
        ZeroEngineError: Parameters are split over several meshes, or over one of several dimensions, or by a placement
            that is no part of a parameter, or have no values and no way to them.
    """
    meshes: dict[bool, Any] = {}
    for module in model.modules():
        if any(hasattr(param, "placements") for param in module.parameters(recurse=False)):
            undo.callback(module.register_load_state_dict_pre_hook(cut_whole_tensors).remove)
    group = dist.group.WORLD if process_group is None else process_group
    for name, param in dtensors_in(model):
        if param.device_mesh.ndim != 1:
            raise ZeroEngineError(
                f"parameter {name} is a DTensor over {param.device_mesh}, of several dimensions. Leave the one over "
                "which states are sharded (fully_shard, fsdp_size) to zeroengine, and split the model over one "
                'dimension, such as mesh["tp"].'
            )
        if param.is_meta and trace_of(param) is None:
            raise ZeroEngineError(
                f"parameter {name} was split on the meta device, and how its values are computed is lost: split the "
                "model by zeroengine.parallelize(), which keeps it, or give each rank memory by "
                "model.to_empty(device=...), and values, before initialize()."
            )
        has_experts = of_experts(param.device_mesh)
        mesh = meshes.setdefault(has_experts, param.device_mesh)
        if param.device_mesh != mesh:
            raise ZeroEngineError(
                f"parameter {name} is split over {param.device_mesh}, and others over {mesh}: split the model over one "
                f"mesh, and experts over one whose dimension is named {' or '.join(map(repr, EXPERT_DIMENSIONS))}."
            )
        expert_ranks = dist.get_world_size(group) // mesh.size() if has_experts else 0
        param.__dict__[SLICE_ATTRIBUTE] = make_slice(name, param, mesh.get_local_rank(), expert_ranks)
        undo.callback(param.__dict__.pop, SLICE_ATTRIBUTE, None)

    over = {key: ranks_in_group(mesh.mesh.tolist(), group) for key, mesh in meshes.items()}
    return SplitOver(over.get(False), over.get(True))


def ranks_in_group(ranks: Sequence[int], group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the numbers that global ranks have in ``group``, the ranks of the engine.

    Raises:
        ZeroEngineError: Some are not in it.
    """
    assert group is not None
    own = dist.get_process_group_ranks(group)
    if not set(ranks) <= set(own):
        raise ZeroEngineError(
            f"the model is split over the ranks {ranks}, and process_group has the ranks {own}, which are not all "
            "of them: leave process_group out. The ranks with the same slices are found by themselves."
        )
    return tuple(dist.get_group_rank(group, rank) for rank in ranks)


def cut_whole_tensors(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cut whole tensors that ``load_state_dict`` is to copy into split parameters, which takes DTensors alone."""
    for key, param in module.named_parameters(prefix.rstrip("."), recurse=False):
        value, part = state.get(key), slice_of(param)
        if isinstance(value, torch.Tensor) and part is not None and tuple(value.shape) == part.shape:
            is_split = hasattr(value, "placements")
            state[key] = value if is_split else wrap(part.cut(value).to(local_tensor(param).device), param)


def limit_waits(model: nn.Module, seconds: float) -> None:
    """Let collectives of split layers, which torch issues, fail after ``seconds``, as those of the engine do.

    The groups of the meshes keep this timeout. That of all ranks, over which user code has collectives, keeps its own.
    """
    for group in {param.device_mesh.get_group() for _, param in dtensors_in(model)} - {dist.group.WORLD}:
        group.set_timeout(timedelta(seconds=seconds))


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds what this rank has of ``param``: ``param`` itself if it is no ``DTensor``."""
    return inside(param) if SLICE_ATTRIBUTE in param.__dict__ else param


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that any ``DTensor`` has on this rank, such as one that a graph has saved; or ``tensor``."""
    local: torch.Tensor = getattr(tensor, LOCAL_TENSOR, tensor)
    return local


def without_values(tensor: Any) -> torch.Tensor:
    """Return a ``DTensor`` of the shape and placements of ``tensor`` that holds no memory."""
    return wrap(torch.empty(0, dtype=tensor.dtype, device=tensor.device), tensor)


def set_local_tensor(param: Any, values: torch.Tensor) -> None:
    """Let ``values``, in the shape of the slice, be what this rank has of a split parameter. It takes their dtype."""
    if param.dtype is not values.dtype or param.is_meta:
        # The shape and the dtype of the whole parameter are not those of the tensor inside.
        other = wrap(values, param)
        if param.is_meta:
            swap_data(param, other)
        else:
            param.data = other
        setattr(param, DTENSOR_SPEC, getattr(other, DTENSOR_SPEC))
    setattr(param, LOCAL_TENSOR, values)


def wrap(values: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a ``DTensor`` of the shape and placements of ``like``, with ``values`` on this rank."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(
            values, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def local_gradient(param: Any, gradient: Any) -> torch.Tensor:
    """Return this rank's part of a gradient of a split parameter.

    Autograd gives ``DTensor``s, and user code may assign a tensor of the whole parameter's shape. Where the operations
    of the backward left terms of a sum, or another part, the model group sums or exchanges them: a collective of the
    group.
    """
    own: torch.Tensor = gradient
    # This runs for each parameter of every backward.
    if SLICE_ATTRIBUTE not in param.__dict__:
        return own
    part = slice_of(param)
    if part is None or not hasattr(gradient, "placements"):
        return own if part is None or tuple(own.shape) != part.shape else part.cut(own)
    if gradient.placements != param.placements:
        gradient = gradient.redistribute(placements=param.placements)
    # Exchanges of torch return at once, and their results wait when they are read.
    local: Any = gradient.to_local()
    result: torch.Tensor = local.wait() if hasattr(local, "wait") else local
    return result


def is_dtensor(param: nn.Parameter) -> bool:
    """Return whether ``param`` is a parameter of an engine that is a ``DTensor``."""
    return SLICE_ATTRIBUTE in param.__dict__ and hasattr(param, LOCAL_TENSOR)
