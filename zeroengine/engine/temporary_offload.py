"""Moves states off the device temporarily, at the user's request, and back."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn

from zeroengine.comm.group import check_same
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.call_checks import NUM_SHOWN
from zeroengine.engine.public_call import ALL, PublicCall
from zeroengine.errors import ReleasedParameterError, ZeroEngineError
from zeroengine.offload import state_offloader
from zeroengine.utils.formats import listed
from zeroengine.utils.host_memory import trim_heap


def offload(
    parts: EngineParts, include: str | Iterable[str] | None, device: str, nvme_path: str | os.PathLike[str] | None
) -> None:
    """Move states to CPU memory or a disk. A collective. See ``Engine.offload_states``."""
    call, offloader, passes, group = "offload_states()", parts.loop.state_offloader, parts.passes, parts.ranks.group
    # The path is not compared, because each rank may have its own disk.
    arguments: dict[str, object] = {"device": device}
    # A plain backward that has not been ended still has reduces to launch.
    with PublicCall(call, "to offload states", ALL, (), ends_backward=True).on_all_ranks(
        parts, arguments
    ) as every_rank:
        names = None if include is None else state_offloader.named_states(include)
        arguments["include"] = names
        path = offloader.check_request(device, nvme_path)
    check_same(call, every_rank)
    # The report may read the gradients, so it comes before they move.
    parts.loop.step_runner.await_and_report()
    # No rank may read memory of this rank, or write to it, once its storage is emptied below.
    passes.gatherer.quiesce()
    passes.reducer.launcher.wait()
    parts.ranks.transport.fence()
    # States that are in CPU memory already stay there, and are away by name, so that a wrong call is found on a laptop.
    tensors = {} if path is None and group.device.type == "cpu" else _tensors_on(group.device, parts)
    chosen = state_offloader.DEFAULT_STATES if names is None else names
    expanded = {state for name in chosen for state in state_offloader.STATE_GROUPS.get(name, (name,))}
    states = {name: tensors.get(name, []) for name in state_offloader.OFFLOADABLE_STATES if name in expanded}
    if "gradients" in states:
        for pool in passes.reducer.launcher.buffer_pools.values():
            pool.free_unused()
    try:
        with group.collective_errors("to offload states"):
            if "parameters" in states:
                _hide_parameters(parts)
            # By default only memory that can be freed is moved. An explicit request for other memory raises an error.
            offloader.offload(states, path, skips_shared=names is None)
    except BaseException:
        # Another rank may have failed, and this one must not be left half way.
        reload(parts)
        raise
    # The user wants free memory, so the memory of temporaries is returned to the system.
    trim_heap()


def _tensors_on(device: torch.device, parts: EngineParts) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of each state on ``device`` that no store of the configuration holds."""
    tensors, outer_step = parts.states.optimizer.tensors(), parts.states.outer_step
    if outer_step is not None:
        tensors["averages"] += outer_step.tensors()
    tensors["gradients"] = parts.passes.reducer.tensors()
    tensors["parameters"] = [unit.shard for unit in parts.partition.units if unit.offloaded_shards is None]
    # On a GPU an optimizer of torch keeps its step counts in CPU memory.
    return {name: [t for t in state if t.device.type == device.type] for name, state in tensors.items()}


def _hide_parameters(parts: EngineParts) -> None:
    """Take the values from all parameters, before their memory is freed. ``reload`` takes it back.

    Raises:
        ZeroEngineError: Other tensors would go on to show the freed memory.
    """
    parts.passes.gatherer.has_values = False
    aliased = []
    for unit in parts.partition.units:
        # The next step gathers the values of the second copy again, so they are not kept.
        if unit.secondary is not None:
            unit.secondary.free()
        if not unit.is_releasable:
            unit.abandon_parameters(_raise_offloaded)
            aliased += unit.full_buffer.aliased_params()
    if aliased:
        raise ZeroEngineError(
            f"offload_states(): other tensors share the memory of {listed(aliased, NUM_SHOWN)}, which "
            "cannot be freed: drop them, such as param.detach() or a loss before its backward, or leave the parameters "
            "out of `include`"
        )


def reload(parts: EngineParts) -> None:
    """Bring back what ``offload`` moved. It is no collective, so that a rank can do it after an error of its own."""
    parts.loop.state_offloader.reload()
    for shard in parts.states.optimizer.shards:
        if shard.is_outdated:
            shard.reload_master()
    if not parts.passes.gatherer.has_values:
        for unit in parts.partition.units:
            if unit.secondary is not None:
                unit.secondary.refill()
            if not unit.is_releasable:
                unit.full_buffer.reattach()
        parts.passes.gatherer.has_values = True


def _raise_offloaded(param: nn.Parameter, operation: str) -> None:
    raise ReleasedParameterError(
        f"`{operation}` of a parameter of shape {tuple(param.shape)} while the parameters are offloaded: call "
        "engine.reload_states() before"
    )
