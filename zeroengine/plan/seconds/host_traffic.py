"""The bytes that CPU ranks of one host send to those of other hosts. See ``comm.transports.two_level`` and ``gloo``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroengine import ops
from zeroengine.comm.packing import is_quantizable
from zeroengine.comm.quantized_transport import GATHER_BITS
from zeroengine.config import Config
from zeroengine.plan.bytes.state_bytes import RankTopology
from zeroengine.plan.bytes.two_level_bytes import sent_sum_bytes
from zeroengine.plan.bytes.unit_bytes import UnitBytes
from zeroengine.plan.seconds.step_collectives import Gather, StepCollectives


@dataclass(frozen=True)
class HostTraffic:
    """Counts what the first host sends to the others.

    Attributes:
        world_size: The number of ranks.
        ranks_per_host: The ranks of each host.
        is_two_level: Whether each rank sends to the ranks of its own number on the other hosts alone. Otherwise each
            rank sends to each other one.
        bits: The bits of the integers that sums of gradients travel as between hosts. None: they travel exactly.
        config: The resolved configuration.
    """

    world_size: int
    ranks_per_host: int
    is_two_level: bool
    bits: int | None
    config: Config

    @classmethod
    def of_units(cls, units: Sequence[UnitBytes], config: Config, topology: RankTopology) -> HostTraffic:
        """Return the traffic between hosts of a run whose units are ``units``."""
        hosts = topology.world_size, topology.ranks_per_host, topology.adds_by_host(units)
        return cls(*hosts, config.zero_optimization.gradient_bits, config)

    def gather_bytes(self, gather: Gather) -> int:
        """Return the bytes of an all-gather."""
        unit = gather.unit
        numel, itemsize = unit.layout.numel // gather.degree, unit.plan.dtype.itemsize
        quantized = self.config.zero_optimization.quantizes_gathers(unit.plan.trainable) and not gather.is_update
        # The second copy holds the rounded values themselves.
        is_packed = quantized and not gather.is_from_second_copy and is_quantizable(unit.plan.dtype)
        nbytes = ops.packet_bytes(numel, GATHER_BITS) if is_packed else numel * itemsize
        return nbytes * self._num_messages(gather)

    def _num_messages(self, gather: Gather) -> int:
        """Return how many shards the ranks of the first host send to other hosts in an all-gather."""
        size, count = self.ranks_per_host, 0
        for rank in range(size):
            others = [other for other in gather.ranks(rank) if other >= size]
            count += sum(other % size == rank for other in others) if self.is_two_level else len(others)
        return count

    def reduce_bytes(self, unit: UnitBytes) -> int:
        """Return the bytes of the reduction of a unit's gradients."""
        assert unit.gradients is not None
        size, num_others = self.ranks_per_host, self.world_size - self.ranks_per_host
        if self.is_two_level:
            return size * sent_sum_bytes(unit, self.world_size, size, self.bits)
        # An all-reduce is a reduce-scatter over all ranks and an all-gather.
        passes = 2 if unit.sum_degree == 1 else 1
        numel = unit.layout.numel // unit.num_sum_slices(self.world_size)
        is_packed = self.bits is not None and is_quantizable(unit.gradients.reduce_dtype)
        itemsize = unit.gradients.reduce_dtype.itemsize
        nbytes = ops.packet_bytes(numel, self.bits or 0) if is_packed else numel * itemsize
        return passes * size * num_others * nbytes

    def step_bytes(self, collectives: StepCollectives) -> int:
        """Return the bytes of all collectives of a step."""
        return int(collectives.total(self.gather_bytes, self.reduce_bytes))
