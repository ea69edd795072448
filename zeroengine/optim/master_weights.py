"""Read and replace the master weights between steps: what must end before, and how all ranks take them over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from zeroengine.comm.interfaces import Transport
from zeroengine.disk.mapped_memory import populate
from zeroengine.offload.placement import Placement
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.outside_writes import OutsideWrites


@dataclass(frozen=True)
class MasterWeights:
    """The master weights of one engine, between steps. Every method is a collective.

    Attributes:
        optimizer: Its shards have the master weights.
        gatherer: Gathers the parameters that all ranks compute with.
        placement: The states that live in CPU memory or on a disk.
        outside_writes: Finds values that user code wrote into the model.
        transport: Moves bytes between the ranks that the states are partitioned over.
    """

    optimizer: ShardedOptimizer
    gatherer: Gatherer
    placement: Placement
    outside_writes: OutsideWrites
    transport: Transport

    def settle(self) -> None:
        """Return when nothing reads or writes parameters and masters, and masters are what the model computes with.

        Call it before they are saved or replaced.

        Raises:
            DivergenceError: On every rank, where the ranks wrote different values into the model.
        """
        self.gatherer.check_has_weights("this call")
        # The order matters. Gathers and copies that are under way write parameters, so they end first. Then ranks
        # compare what the user wrote, so that masters take over only values that all ranks share. Eviction comes last,
        # for it gives back what reloading the masters brought into memory.
        self.gatherer.quiesce()
        self.placement.finish_copies()
        self.outside_writes.compare()
        self.optimizer.reload_masters()
        self.placement.evict()

    def publish(self, values: Callable[[OptimizerShard], torch.Tensor] = attrgetter("master")) -> None:
        """Let all ranks compute with values that something else than a step wrote.

        Args:
            values: Returns the values of a shard: the master weights, or what stands for them in an evaluation.
        """
        # A load may have written masters through copies that are still under way.
        self.placement.finish_copies()
        for shard in self.optimizer.shards:
            source = values(shard)
            if source is not shard.param:
                # A state on a disk is read in now, where a failing disk raises an error. A later page fault would end
                # the process.
                populate(source)
                populate(shard.param, write=True)
                shard.param.copy_(source)
            # The order of units is the same on every rank, as the all-gather of updated units requires.
            self.gatherer.publish_updates([shard.unit])
            # At most one unit is in memory at a time where states live on a disk.
            self.placement.evict(shard.param, source)
        # These values were written on purpose and on every rank, so they are no divergence.
        self.outside_writes.reset_baseline()
        self.gatherer.quiesce()
        # Ranks that share memory read parameters of each other in place. None may go on while a peer still writes.
        self.transport.fence()

    @contextlib.contextmanager
    def averages(self) -> Iterator[None]:
        """Let the model compute with the moving averages inside. Leave it when all ranks have ended their forwards."""
        self.settle()
        # Parameters that are their own masters have their values nowhere else. They change places with averages of
        # their dtype, unless the user can write them, and are copied otherwise.
        own = [(shard, _average(shard)) for shard in self.optimizer.shards if not shard.unit.has_master]
        swapped = [s for s, average in own if s.unit.is_releasable and average.dtype is s.param.dtype]
        copies: dict[int, torch.Tensor] = {}
        for shard, _ in own:
            if shard not in swapped:
                populate(shard.param)
                copies[shard.index] = shard.param.clone()
                self.placement.evict(shard.param)
        self.gatherer.has_averages = True
        try:
            # Ranks may still read parameters in place.
            self.transport.fence()
            self._swap(swapped)
            self.publish(lambda shard: shard.param if shard in swapped else _average(shard))
            yield
        finally:
            self.gatherer.quiesce()
            self.transport.fence()
            self._swap(swapped)
            self.publish(lambda shard: copies.get(shard.index, shard.master))
            self.gatherer.has_averages = False

    def _swap(self, shards: Sequence[OptimizerShard]) -> None:
        """Exchange parameters and averages."""
        for shard in shards:
            param, average = shard.param, _average(shard)
            for state in (param, average):
                populate(state, write=True)
            values = average.clone()
            average.copy_(param)
            param.copy_(values)
            self.placement.evict(param, average)

    def round(self) -> None:
        """Let masters take the rounded values that the model computes with."""
        self.settle()
        for shard in self.optimizer.shards:
            if shard.unit.has_master:
                populate(shard.param)
                populate(shard.master, write=True)
                shard.master.copy_(shard.param)
                self.placement.evict(shard.param, shard.master)


def _average(shard: OptimizerShard) -> torch.Tensor:
    assert shard.average is not None
    return shard.average
