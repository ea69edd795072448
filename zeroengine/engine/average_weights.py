"""Let a model compute with the moving averages of its weights for a while."""

from __future__ import annotations

from contextlib import AbstractContextManager

from zeroengine.comm.group import check_same
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.call_checks import check_outside_of_backward, check_outside_of_gathered
from zeroengine.errors import ZeroEngineError


def check_keeps_averages(parts: EngineParts, call: str) -> None:
    """Check that the configuration has a moving average.

    Raises:
        ZeroEngineError: It has none.
    """
    if parts.setup.config.ema is None:
        raise ZeroEngineError(
            f'{call}: no moving average of the weights is kept; write "ema": {{"decay": 0.999}} in the configuration'
        )


def average_weights(parts: EngineParts, call: str) -> AbstractContextManager[None]:
    """Return a context in which the model computes with the averages. A collective, as are its begin and its end.

    Args:
        parts: The parts of the engine.
        call: The public call.

    Raises:
        ZeroEngineError: On every rank: no averages are kept, or this is inside of such a context, of ``gathered``, of a
            forward or of a backward, or states are offloaded.
    """
    # A plain loss.backward() may not have been ended yet.
    parts.passes.backward.end_if_over()
    with parts.ranks.group.collective_errors("to compute with the average weights", {"call": call}) as calls:
        check_keeps_averages(parts, call)
        parts.loop.state_offloader.check_resident(call)
        parts.partition.placement.check_intact()
        check_outside_of_gathered(parts.passes.gatherer, call)
        check_outside_of_backward(call)
        if parts.passes.forward.num_model_forwards:
            raise ZeroEngineError(f"{call} inside of a forward: call it before")
    check_same(call, calls)
    # Masters include the last step once its result is known.
    parts.loop.step_runner.await_and_report()
    return parts.states.master_weights.averages()
