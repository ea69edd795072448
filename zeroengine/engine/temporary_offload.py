"""Moves states off the device temporarily, at the user's request, and back."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import nn

from zeroengine.comm.group import check_same
from zeroengine.engine.assembly import EngineParts
from zeroengine.errors import ReleasedParameterError
from zeroengine.offload import state_offloader
from zeroengine.utils.malloc_trim import trim_heap


def offload(
    parts: EngineParts, include: Sequence[str] | None, device: str, nvme_path: str | os.PathLike[str] | None
) -> None:
    """Move states to CPU memory or a disk. A collective. See ``Engine.offload_states``."""
    zero, group = parts.setup.config.zero_optimization, parts.ranks.group
    configured_path = zero.offload_optimizer.disk or zero.offload_param.disk
    # The path is not compared, because each rank may have its own disk.
    arguments = {"include": None if include is None else sorted(include), "device": device}
    with group.collective_errors("to offload states", arguments) as every_rank:
        parts.passes.gatherer.check_has_weights("offload_states()")
        path = parts.loop.state_offloader.check_request(include, device, nvme_path, configured_path)
    check_same("offload_states()", every_rank)
    # A plain backward that has not been ended still has reduces to launch.
    parts.passes.backward.end_if_over()
    # The report may read the gradients, so it comes before they move.
    parts.loop.step_runner.await_and_report()
    # No rank may read memory of this rank, or write to it, once its storage is emptied below.
    parts.passes.gatherer.quiesce()
    parts.passes.reducer.reduces.wait()
    parts.ranks.transport.fence()
    # The states are already in CPU memory. The checks above ran first, so that a wrong call is also found on a laptop.
    if device == "cpu" and group.device.type == "cpu":
        return
    units, states, offloader = parts.partition.units, parts.states, parts.loop.state_offloader
    tensors = {
        "optimizer": states.optimizer.tensors() + ([] if states.outer_step is None else states.outer_step.tensors()),
        "gradients": [grads.flat_grads for grads in parts.passes.reducer.gradients if grads.store is None],
        "parameters": [unit.shard for unit in units if unit.offloaded_shards is None],
    }
    # By default only memory that can be freed is moved. An explicit request for other memory raises an error.
    if include is None:
        include = state_offloader.DEFAULT_STATES
        tensors = {name: [t for t in state if t.untyped_storage().resizable()] for name, state in tensors.items()}
    with group.collective_errors("to offload states"):
        offloader.offload({name: tensors[name] for name in include}, path, parts.setup.config, group.rank)
    if "parameters" in include:
        for unit in units:
            # The next step gathers the values of the second copy again, so they are not kept.
            if unit.secondary is not None:
                unit.secondary.free()
            if not unit.is_releasable:
                unit.abandon_parameters(_raise_offloaded)
    # The user wants free memory, so the memory of temporaries is returned to the system.
    trim_heap()


def reload(parts: EngineParts) -> None:
    """Bring back what ``offload`` moved. A collective."""
    parameters_were_away = parts.loop.state_offloader.holds("parameters")
    parts.loop.state_offloader.reload()
    if parameters_were_away:
        for unit in parts.partition.units:
            if unit.secondary is not None:
                unit.secondary.refill()
            if not unit.is_releasable:
                unit.full_buffer.reattach()


def _raise_offloaded(param: nn.Parameter, operation: str) -> None:
    raise ReleasedParameterError(
        f"`{operation}` of a parameter of shape {tuple(param.shape)} while the parameters are offloaded: call "
        "engine.reload_states() before"
    )
