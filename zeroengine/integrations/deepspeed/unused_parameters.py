"""``"ignore_unused_parameters": false``: a step with a parameter that got no gradient is an error."""

from __future__ import annotations

from zeroengine.engine.engine import Engine
from zeroengine.errors import ZeroEngineError


class UnusedParameterError(ZeroEngineError, AssertionError):
    """A parameter got no gradient in a step. DeepSpeed asserts this, and scripts catch its class of error."""


def check_parameters_used(engine: Engine) -> None:
    """Raise ``UnusedParameterError`` if a trained parameter got no gradient on this rank since the last update.

    Call it after ``Engine.is_gradient_accumulation_boundary``, which also ends a plain backward.
    """
    unused = [
        slot.name
        for shard in engine.optimizer.shards
        for slot, has_grad in zip(shard.unit.layout.slots, shard.unit_grads.has_grad, strict=True)
        if not has_grad
    ]
    if unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        raise UnusedParameterError(
            f"step(): these parameters got no gradient: {', '.join(unused[:5])}{more}. Use them in the loss, freeze "
            'them with requires_grad_(False), or write "ignore_unused_parameters": true in "zero_optimization"'
        )
