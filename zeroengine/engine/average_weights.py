"""Let a model compute with the moving averages of its weights for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.public_call import ALL, PublicCall
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.formats import counted
from zeroengine.utils.torch_internals import version_of


def check_keeps_averages(parts: EngineParts, call: str) -> None:
    """Check that the configuration has a moving average.

    Raises:
        ZeroEngineError: It has none.
    """
    if parts.setup.config.ema is None:
        raise ZeroEngineError(
            f'{call}: no moving average of the weights is kept; write "ema": {{"decay": 0.999}} in the configuration'
        )


@contextmanager
def average_weights(parts: EngineParts, call: str) -> Iterator[None]:
    """Let the model compute with the averages inside the ``with``. Its begin and its end are collectives.

    Where the engine trains nothing, the weights are their averages.

    Args:
        parts: The parts of the engine.
        call: The public call.

    Raises:
        ZeroEngineError: On every rank: no averages are kept, or this is inside of such a context, of ``gathered``, of a
            forward or of a backward, or states are offloaded.
    """
    purpose = "to compute with the average weights"
    is_trained = any(unit.trainable for unit in parts.partition.units)
    with PublicCall(call, purpose, ALL, needs_store=True, ends_backward=True).on_all_ranks(parts):
        if is_trained:
            check_keeps_averages(parts, call)
    if not is_trained:
        # The average of weights that never change. Code that evaluates serves engines that train and those that do not.
        yield
        return
    # Masters include the last step once its result is known.
    parts.loop.step_runner.await_and_report()
    # A released unit has writes in ``gathered`` alone, which checks them.
    writable = [param for unit in parts.partition.units if not unit.is_releasable for param in unit.params]
    with parts.states.master_weights.averages():
        versions = [version_of(param) for param in writable]
        try:
            yield
        finally:
            written = [param for param, version in zip(writable, versions, strict=True) if version_of(param) != version]
            # A peer may still compute with the parameters in this rank's memory, so no rank restores its own before all
            # have come here. After an error inside, too, since the other ranks wait.
            parts.ranks.group.all_gather_object(None, f"at the end of {call}")
    if written:
        raise ZeroEngineError(
            f"{call}: {counted(len(written), 'parameter')} changed inside, such as by load_state_dict(). This is lost, "
            "since averages follow the weights. Write into the weights, before it or after it."
        )
