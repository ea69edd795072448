"""Run a method of the caller's optimizer over the shards of all ranks. See ``optim/own_methods.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.public_call import ALL, WEIGHTS, PublicCall
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.elementwise import acts_elementwise


def call_over_shards(parts: EngineParts, name: str, act: Callable[[torch.optim.Optimizer], Any], reads: bool) -> Any:
    """Return what a member of the caller's optimizer returns. See ``CallOverShards``. A collective, unless it reads.

    Before it, masters take over what the user wrote into the model; after it, all ranks compute with what it made of
    them, as after a step.

    Raises:
        ZeroEngineError: The member looks at whole parameters where there are shards, or it is called inside of a
            forward, of a backward or of ``gathered``. On every rank; nothing has changed.
        Exception: The member's own, on every rank.
    """
    backend, call = parts.states.optimizer.backend, f"optimizer.{name}"
    if reads:
        PublicCall(call, "", WEIGHTS).check(parts)
        _check_elementwise(parts, name, act)
        backend.await_step_counts()
        parts.states.optimizer.reload_masters()
        return _callers(parts, backend.run(act))
    with PublicCall(call, f"to call {call}", ALL, needs_store=True, ends_backward=True).on_all_ranks(parts):
        _check_elementwise(parts, name, act)
    parts.loop.step_runner.await_result()
    parts.states.master_weights.settle()
    # Ranks may read this rank's parameters in place.
    parts.ranks.transport.fence()
    result, error = None, None
    try:
        result = backend.run(act)
    except Exception as raised:
        error = raised
    # In plain PyTorch, what a method did before it raised stays done. The ranks take part in this before they compare
    # their errors.
    parts.states.master_weights.publish()
    parts.partition.placement.evict()
    with parts.ranks.group.collective_errors(f"to call {call}"):
        if error is not None:
            raise error
    return _callers(parts, result)


def _callers(parts: EngineParts, result: Any) -> Any:
    """Return the optimizer that the user has in place of the one that the method saw, as of ``return self``."""
    caller = parts.states.base_optimizer
    return caller if isinstance(result, torch.optim.Optimizer) else result


def _check_elementwise(parts: EngineParts, name: str, act: Callable[[torch.optim.Optimizer], Any]) -> None:
    states, optimizer = parts.states, parts.states.base_optimizer
    is_whole = all(shard.unit.degrees.optimizer == 1 for shard in states.optimizer.shards)
    if name in states.elementwise_members or is_whole:
        return
    if not acts_elementwise(optimizer, act):
        raise ZeroEngineError(
            f"{type(optimizer).__name__}.{name}: what it does with an element, or returns, depends on other elements, "
            "and each rank has a part of each parameter. Call it at zero_optimization.stage 0, or compute the same "
            "from zeroengine.full_master(), full_optimizer_state() and set_full_master()."
        )
    states.elementwise_members.add(name)
