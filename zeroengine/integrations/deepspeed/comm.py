"""``deepspeed.comm``: DeepSpeed's own functions over ``torch.distributed``; every other name is torch's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeroengine.comm.group import Group, default_device
from zeroengine.comm.launched_ranks import has_peers, join_launched_ranks
from zeroengine.integrations.deepspeed.accelerator import get_accelerator


def __getattr__(name: str) -> Any:
    try:
        return getattr(dist, name)
    except AttributeError:
        raise AttributeError(
            f"deepspeed.comm.{name} is neither a function of torch.distributed nor served by zeroengine; "
            "write the collective with torch.distributed"
        ) from None


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed, unless it is running or ``dist_init_required`` is False.

    Args:
        dist_backend: "nccl" or "gloo". None: what fits the device.
        auto_mpi_discovery: Whether the ranks of mpirun and srun are found.
        distributed_port: The port of rank 0, where the launcher set none.
        verbose: Not used.
        timeout: As of ``torch.distributed.init_process_group``.
        init_method: As of ``torch.distributed.init_process_group``.
        dist_init_required: None and True start it.
        config: Not used.
        rank: This rank, with ``init_method``; -1 reads the environment.
        world_size: The number of ranks, with ``init_method``; -1 reads the environment.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    if auto_mpi_discovery:
        join_launched_ranks()
    backend = dist_backend or get_accelerator().communication_backend_name()
    if init_method is None and rank < 0 and not has_peers():
        # One process alone needs no address.
        Group(None, torch.device("cpu") if backend == "gloo" else default_device())
        return
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    dist.init_process_group(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size)


def get_rank(group: Any = None) -> int:
    """Return this process's rank.

    Raises:
        AssertionError: torch.distributed is not running.
    """
    _check_running()
    return int(dist.get_rank(group))


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks.

    Raises:
        AssertionError: torch.distributed is not running.
    """
    _check_running()
    return int(dist.get_world_size(group))


def get_local_rank() -> int:
    """Return this process's rank on its host."""
    _check_running()
    return int(os.environ.get("LOCAL_RANK", "0"))


def _check_running() -> None:
    # DeepSpeed's class of error, which callers catch.
    assert dist.is_initialized(), "torch.distributed is not running; call deepspeed.init_distributed() first"


def get_world_group() -> Any:
    """Return the process group of all ranks."""
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the rank in the whole run of ``group_rank`` in ``group``."""
    return group_rank if group is None else int(dist.get_global_rank(group, group_rank))


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the ranks in the whole run of all members of ``group``."""
    return list(range(get_world_size())) if group is None else list(dist.get_process_group_ranks(group))


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Return a DeviceMesh over all ranks."""
    kind = get_accelerator().device_name()
    return dist.device_mesh.init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False, debug: object = None
) -> Any:
    """Gather the tensors of all ranks into one. Gloo takes none without a dimension, so such a one gets one."""
    value = tensor.reshape(1) if tensor.dim() == 0 else tensor
    return dist.all_gather_into_tensor(output_tensor, value, group=group, async_op=async_op)


allgather_fn = all_gather_into_tensor


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor], group: Any = None
) -> None:
    """Gather each input of all ranks into the output of the same index."""
    for output, value in zip(output_tensors, input_tensors, strict=True):
        all_gather_into_tensor(output, value, group=group)


def all_reduce_coalesced(tensors: Sequence[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    """Reduce each tensor over the ranks, in place."""
    for tensor in tensors:
        dist.all_reduce(tensor, op=op, group=group)


def reduce_scatter_fn(output_tensor: torch.Tensor, tensor: torch.Tensor, group: Any = None, **options: Any) -> Any:
    """Reduce ``tensor`` over the ranks, and give each rank its part."""
    options.pop("debug", None)
    return dist.reduce_scatter_tensor(output_tensor, tensor, group=group, **options)


inference_all_reduce = dist.all_reduce


def configure(*args: object, **options: object) -> None:
    """Do nothing: write "comms_logger" in the configuration to record collectives."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> None:
    """Do nothing: with "comms_logger" in the configuration the engine prints its collectives when it ends."""
