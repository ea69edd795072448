"""Read and replace the master weights between steps: what must end before, and how all ranks take them over."""

from __future__ import annotations

from zeroengine.disk.mapped_memory import populate
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.call_checks import check_outside_of_gathered


def settle_parameters(parts: EngineParts) -> None:
    """Return when nothing reads or writes parameters and masters, and masters are what the model computes with.

    Call it on every rank, before they are saved or replaced.

    Raises:
        DivergenceError: On every rank, where the ranks wrote different values into the model.
    """
    # The order matters. Gathers and copies that are under way write parameters, so they end first. Then ranks compare
    # what the user wrote, so that masters take over only values that all ranks share. Eviction comes last, for it gives
    # back what reloading the masters brought into memory.
    parts.gatherer.quiesce()
    parts.placement.finish_copies()
    parts.outside_writes.compare()
    parts.optimizer.reload_masters()
    parts.placement.evict()


def publish_masters(parts: EngineParts) -> None:
    """Let all ranks compute with master weights that were written by something else than a step. A collective."""
    # A load may have written masters through copies that are still under way.
    parts.placement.finish_copies()
    for shard in parts.optimizer.shards:
        if shard.unit.is_mixed_precision:
            # A state on a disk is read in now, where a failing disk raises an error. A later page fault would end the
            # process.
            populate(shard.master)
            populate(shard.param, write=True)
            shard.param.copy_(shard.master)
        # The order of units is the same on every rank, as the all-gather of updated units requires.
        parts.gatherer.gathers.publish_update(shard.unit)
        # At most one unit is in memory at a time where states live on a disk.
        parts.placement.evict(shard.param, shard.master)
    # These values were written on purpose and on every rank, so they are no divergence.
    parts.outside_writes.reset_baseline()
    parts.gatherer.quiesce()
    # Ranks that share memory read parameters of each other in place. None may go on while a peer still writes.
    parts.transport.fence()


def round_masters(parts: EngineParts) -> None:
    """Let masters take the rounded values that the model computes with. See ``Engine.round_masters``."""
    check_outside_of_gathered(parts, "round_masters()")
    settle_parameters(parts)
    for shard in parts.optimizer.shards:
        if shard.unit.is_mixed_precision:
            populate(shard.param)
            populate(shard.master, write=True)
            shard.master.copy_(shard.param)
            parts.placement.evict(shard.param, shard.master)
