"""The seconds of collectives, by the way in which they move bytes.

[Note: Ways]
rings       NCCL, and ranks of one node. A ring over several nodes crosses the network of each node once, so the slower
            of a link and the network bounds it, and each node sends nearly all bytes of the result
two levels  CPU ranks of several nodes. Ranks of a node move bytes through shared memory, which takes their own time.
            Each byte goes to another node once per node, and not once per rank
directly    CPU ranks of several nodes over Gloo: each rank sends to each other one
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zeroengine.config import Config
from zeroengine.memory.state_bytes import RankTopology
from zeroengine.memory.unit_bytes import UnitBytes
from zeroengine.plan.seconds.host_traffic import HostTraffic
from zeroengine.plan.seconds.machine import Machine
from zeroengine.plan.seconds.step_collectives import GatherBytes


class Seconds(NamedTuple):
    """The time of one collective.

    Attributes:
        own: Seconds of the rank's own thread, which nothing hides.
        hidden: Seconds that a computation can hide, if the transport overlaps.
        crosses: Whether ``hidden`` is time of the network between nodes.
    """

    own: float
    hidden: float
    crosses: bool = False


def collectives_of(
    units: Sequence[UnitBytes], config: Config, topology: RankTopology, machine: Machine
) -> RingCollectives | HostCollectives:
    """Return the seconds of the collectives of a run, or of one replica of ``local_steps``.

    Args:
        units: The units.
        config: The resolved configuration.
        topology: The ranks, the device and the transport.
        machine: The machine that these ranks run on.
    """
    if machine.device == "cpu" and machine.nodes > 1:
        return HostCollectives(machine, HostTraffic.of_units(units, config, topology))
    return RingCollectives(machine)


class RingCollectives:
    """See "Ways" above."""

    def __init__(self, machine: Machine) -> None:
        self._rates, self._world_size = machine.rates, machine.world_size
        self._ranks_per_node = machine.ranks_per_node

    def rate(self, link: float, degree: int, within: int) -> float:
        """Return the bytes per second that a rank receives from ``degree // within`` ranks, ``within`` apart."""
        if degree <= self._ranks_per_node:
            return link
        # Ranks that are some ranks apart form that many rings, which share the network.
        return min(link, self._rates.node_link / min(within, self._ranks_per_node))

    def gather(self, gather: GatherBytes) -> Seconds:
        """Return the seconds of an all-gather."""
        seconds = self._gather(gather.unit.full_bytes, gather.degree, gather.within)
        return Seconds(0.0, seconds, gather.degree > self._ranks_per_node)

    def _gather(self, nbytes: int, degree: int, within: int) -> float:
        received = nbytes / within - nbytes / degree
        return self._rates.latency + received / self.rate(self._rates.link, degree, within) if received else 0.0

    def all_reduce(self, nbytes: int, count: int, within: int) -> float:
        """Return the seconds of an all-reduce of ``nbytes`` over ``count`` ranks, ``within`` apart."""
        received = 2 * nbytes * (count - 1) / count
        return self._rates.latency + received / self.rate(self._rates.reduce_link, count * within, within)

    def reduce(self, unit: UnitBytes) -> Seconds:
        """Return the seconds of the reduction of a unit's gradients.

        They are summed among the ranks that hold different slices, and the sums among those that hold the same slice.
        """
        if self._world_size == 1:
            return Seconds(0.0, 0.0)
        assert unit.gradients is not None
        nbytes, degree = unit.layout.numel * unit.gradients.reduce_dtype.itemsize, unit.sum_degree
        seconds = self._rates.latency
        seconds += (nbytes - nbytes / degree) / self.rate(self._rates.reduce_link, degree, 1)
        if degree < self._world_size:
            received = nbytes / degree - nbytes / self._world_size
            seconds += received / self.rate(self._rates.reduce_link, self._world_size, degree)
            seconds += self._gather(nbytes, self._world_size, degree)
        return Seconds(0.0, seconds, self._world_size > self._ranks_per_node)


class HostCollectives:
    """See "Ways" above: two levels, or directly."""

    def __init__(self, machine: Machine, traffic: HostTraffic) -> None:
        self._rates, self._traffic = machine.rates, traffic
        self._ranks_per_node, self._world_size = machine.ranks_per_node, machine.world_size

    def gather(self, gather: GatherBytes) -> Seconds:
        """Return the seconds of an all-gather."""
        nbytes, sent = gather.unit.full_bytes, self._traffic.gather_bytes(gather)
        received = nbytes / gather.within - nbytes / gather.degree
        if not self._traffic.is_two_level:
            return self._direct(received, sent, self._rates.link)
        # What comes from other nodes goes straight to its place if no other rank of the node needs it.
        own = received / self._rates.link if gather.within < self._ranks_per_node else 0.0
        return Seconds(own, self._network(sent), sent > 0)

    def reduce(self, unit: UnitBytes) -> Seconds:
        """Return the seconds of the reduction of a unit's gradients."""
        assert unit.gradients is not None
        nbytes, sent = unit.layout.numel * unit.gradients.reduce_dtype.itemsize, self._traffic.reduce_bytes(unit)
        degree = unit.sum_degree
        if not self._traffic.is_two_level:
            slice_bytes = nbytes / unit.num_sum_slices(self._world_size)
            received = (self._world_size - 1) * slice_bytes * (2 if degree == 1 else 1)
            return self._direct(received, sent, self._rates.reduce_link)
        # A rank adds its part of the values of all ranks of its node, and ranks with the same slice share the parts.
        size = self._ranks_per_node
        own = nbytes * (size - 1) / size / self._rates.reduce_link
        if degree < size:
            own += (nbytes / degree - nbytes / size) / self._rates.link
        return Seconds(own, self._network(sent), sent > 0)

    def _network(self, sent: int) -> float:
        """Return the seconds in which a node sends so many bytes to the others."""
        return self._rates.latency + sent / self._rates.node_link if sent else 0.0

    def _direct(self, received: float, sent: int, link: float) -> Seconds:
        """Return the time of an operation in which a rank receives so many bytes. Gloo's threads move all of them."""
        from_own_node = received - sent / self._ranks_per_node
        within = self._rates.latency + from_own_node / link if from_own_node >= 1 else 0.0
        return Seconds(0.0, max(within, self._network(sent)), sent > 0)
