"""What users pass for the ranks to partition over: a process group, or a mesh of devices."""

from __future__ import annotations

import torch.distributed as dist

from zeroengine.errors import ZeroEngineError
from zeroengine.utils.torch_internals import flatten_mesh


def shard_ranks_of(value: object) -> int | None:
    """Return the number of ranks that states are partitioned over, if ``value`` is a mesh for hybrid sharding (HSDP).

    Args:
        value: What ``as_process_group`` takes.

    Returns:
        The size of the second dimension of a ``DeviceMesh``, if its names end in "replicate" and "shard"; else None.
    """
    if not isinstance(value, dist.DeviceMesh) or value.ndim != 2 or value.mesh_dim_names is None:
        return None
    replicate, shard = value.mesh_dim_names
    return value.size(1) if replicate.endswith("replicate") and shard.endswith("shard") else None


def as_process_group(value: object) -> dist.ProcessGroup | None:
    """Return the process group that ``value`` stands for, or None for all ranks.

    Args:
        value: A process group, a ``DeviceMesh`` of one dimension or for hybrid sharding (``shard_ranks_of``), or None.

    Raises:
        ZeroEngineError: It is something else, or this rank does not belong to it.
    """
    if value is None or isinstance(value, dist.ProcessGroup):
        return value
    outside = "process_group: this rank is not one of its ranks. Call initialize() on those alone."
    if isinstance(value, dist.DeviceMesh):
        if shard_ranks_of(value) is not None and value.get_coordinate() is not None:
            ranks = value.mesh.flatten().tolist()
            if ranks != sorted(ranks):
                raise ZeroEngineError(
                    f"process_group: the ranks of the mesh are {value.mesh.tolist()}, and a row must be "
                    "consecutive ranks, in order, as init_device_mesh makes it"
                )
            return None if ranks == list(range(dist.get_world_size())) else flatten_mesh(value).get_group()
        if value.ndim > 1:
            names = value.mesh_dim_names
            sizes = dict(zip(names, value.shape, strict=True)) if names else tuple(value.shape)
            example = f"process_group=mesh[{names[0]!r}]" if names else "process_group=mesh.get_group(0)"
            raise ZeroEngineError(
                f"process_group: found a DeviceMesh of {value.ndim} dimensions, {sizes}. Pass the one of the "
                f"data-parallel ranks, such as {example}, or the two of hybrid sharding, whose names end in "
                '"replicate" and "shard", in this order'
            )
        if value.get_coordinate() is None:
            raise ZeroEngineError(outside)
        return value.get_group()
    # ``new_group`` returns this value on ranks outside of the group.
    if value == dist.GroupMember.NON_GROUP_MEMBER:
        raise ZeroEngineError(outside)
    raise ZeroEngineError(
        f"process_group: found {value!r}. Pass a process group, such as torch.distributed.new_group([0, 1]), or a "
        "DeviceMesh of one dimension"
    )
