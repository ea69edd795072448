"""The bytes that CPU ranks of one host send to those of other hosts. See ``comm.transports.two_level`` and ``gloo``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroengine import ops
from zeroengine.comm.packing import is_quantizable
from zeroengine.comm.quantized_transport import GATHER_BITS
from zeroengine.config import Config
from zeroengine.memory.state_bytes import RankTopology
from zeroengine.memory.two_level_bytes import sent_sum_bytes
from zeroengine.memory.unit_bytes import UnitBytes
from zeroengine.plan.seconds.step_collectives import GatherBytes


@dataclass(frozen=True)
class HostTraffic:
    """Counts what the first host sends to the others.

    Attributes:
        world_size: The number of ranks.
        ranks_per_host: The ranks of each host.
        is_two_level: Whether each rank sends to the ranks of its own number on the other hosts alone. Otherwise each
            rank sends to each other one.
        config: The resolved configuration.
    """

    world_size: int
    ranks_per_host: int
    is_two_level: bool
    config: Config

    @classmethod
    def of_units(cls, units: Sequence[UnitBytes], config: Config, topology: RankTopology) -> HostTraffic:
        """Return the traffic between hosts of a run whose units are ``units``."""
        return cls(topology.world_size, topology.ranks_per_host, topology.adds_by_host(units), config)

    def gather_bytes(self, gather: GatherBytes) -> int:
        """Return the bytes of an all-gather."""
        unit, size = gather.unit, self.ranks_per_host
        if gather.degree <= size:
            return 0
        # A rank gathers with so many ranks, some of them on its own host.
        num_ranks, num_local = gather.degree // gather.within, max(size // gather.within, 1)
        quantized = self.config.zero_optimization.quantizes_gathers(unit.plan.trainable) and not gather.is_exact
        nbytes = _message_bytes(unit.layout.numel // gather.degree, unit.plan.dtype, GATHER_BITS if quantized else None)
        num_receivers = num_ranks // num_local - 1 if self.is_two_level else num_ranks - num_local
        return size * num_receivers * nbytes

    def reduce_bytes(self, unit: UnitBytes) -> int:
        """Return the bytes of the reduction of a unit's gradients."""
        assert unit.gradients is not None
        size, bits = self.ranks_per_host, self.config.zero_optimization.gradient_bits
        if self.is_two_level:
            return size * sent_sum_bytes(unit, self.world_size, size, bits)
        # An all-reduce is a reduce-scatter over all ranks and an all-gather.
        passes = 2 if unit.sum_degree == 1 else 1
        numel = unit.layout.numel // unit.num_sum_slices(self.world_size)
        nbytes = _message_bytes(numel, unit.gradients.reduce_dtype, bits)
        return passes * size * (self.world_size - size) * nbytes


def _message_bytes(numel: int, dtype: torch.dtype, bits: int | None) -> int:
    """Return the bytes of so many elements in a packet of integers of so many bits. None: they travel exactly."""
    is_packed = bits is not None and is_quantizable(dtype)
    return ops.packet_bytes(numel, bits or 0) if is_packed else numel * dtype.itemsize
