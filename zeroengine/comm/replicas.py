"""The process groups of replicas that train apart: the ranks of one replica, and those that average together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.transports.choose import open_transport
from zeroengine.comm.watchdog import Watchdog
from zeroengine.partition.replicas import ReplicaLayout
from zeroengine.utils.process_groups import destroy_group


@dataclass(frozen=True)
class Replicas:
    """The groups of this rank. See ``ReplicaLayout``.

    Attributes:
        layout: Which ranks are in which replica.
        group: The ranks of this rank's replica.
        counterparts: The ranks that hold the same elements, one of each replica.
        between: Moves bytes between the counterparts.
        watchdog: The watchdog of all ranks; None over the fake backend.
    """

    layout: ReplicaLayout
    group: Group
    counterparts: Group
    between: Transport
    watchdog: Watchdog | None

    def close(self) -> None:
        """Close the transport, the watchdog and the groups. The transport of the replica is closed before."""
        self.between.close()
        if self.watchdog is not None:
            self.watchdog.close()
            for group in (self.group, self.counterparts):
                destroy_group(group.process_group)


class RankSums(Protocol):
    """The part of ``Transport`` that sums small vectors.

    Attributes:
        rank: This rank.
        world_size: The number of ranks.
        has_peers: Whether there are other ranks that it sums over.
    """

    rank: int
    world_size: int
    has_peers: bool

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """See ``Transport.all_reduce_scalars``."""


class SumsOverReplicas:
    """Sums small vectors over the ranks of all replicas. See ``RankSums``.

    Args:
        transport: Moves bytes between the ranks of the replica.
        replicas: All replicas.
    """

    def __init__(self, transport: Transport, replicas: Replicas) -> None:
        self._transport, self._between = transport, replicas.between
        self.rank = replicas.group.numbers[replicas.group.rank]
        self.world_size = replicas.layout.num_replicas * replicas.layout.ranks_per_replica
        self.has_peers = transport.has_peers or replicas.between.has_peers

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """Sum over the ranks of each replica, and then over the counterparts."""
        return self._between.all_reduce_scalars(self._transport.all_reduce_scalars(values, label), label)


def open_replicas(
    group: Group,
    layout: ReplicaLayout,
    kind: str,
    timeout: float,
    members: Sequence[int] | None = None,
    counterparts: Sequence[int] | None = None,
) -> Replicas:
    """Divide the ranks of ``group`` into replicas. A collective.

    Args:
        group: All ranks.
        layout: Which of them are in which replica.
        kind: ``auto``, ``shm`` or ``gloo``: the configuration's ``comm.transport``.
        timeout: Seconds after which a stalled operation is an error.
        members, counterparts: The ranks of this rank's replica and its counterparts. None: those of ``layout``.
    """
    # The fake backend has no peers whose positions a watchdog could ask for.
    watchdog = None if group.backend == "fake" else group.start_watchdog(timeout)
    replica = group.subgroup(members or layout.members, watchdog)
    others = group.subgroup(counterparts or layout.counterparts, watchdog)
    # "shm" asks for shared memory within a machine, and replicas may be on several.
    between = open_transport(others, "auto" if kind == "shm" else kind, timeout)
    return Replicas(layout, replica, others, between, watchdog)
