"""The ranks that hold one model together, each of them other slices of its parameters (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zeroengine.comm.forwarding_transport import ForwardingTransport
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.replicas import Replicas, open_replicas
from zeroengine.comm.transports.choose import open_transport
from zeroengine.comm.watchdog import Watchdog
from zeroengine.errors import ZeroEngineError
from zeroengine.partition.replicas import ReplicaLayout
from zeroengine.partition.slices import ModelLayout
from zeroengine.utils.process_groups import destroy_group


def check_model_groups(groups: Sequence[tuple[int, ...] | None]) -> list[tuple[int, ...]]:
    """Return the model groups of all ranks, in order.

    Args:
        groups: For each rank the ranks of its mesh; None: its model is not split.

    Raises:
        ZeroEngineError: The groups do not divide the ranks into equal parts, or have them in different orders, so that
            the ranks of a group would have different places among those with the same slices.
    """
    distinct = sorted({group for group in groups if group is not None})
    members = sorted(rank for group in distinct for rank in group)
    are_equal = members == list(range(len(groups))) and len({len(group) for group in distinct}) <= 1
    if not are_equal or any(list(ranks) != sorted(ranks) for ranks in zip(*distinct, strict=True)):
        shown = ", ".join("none" if group is None else str(list(group)) for group in dict.fromkeys(groups))
        raise ZeroEngineError(
            f"the model is split over ranks {shown}, and the ranks of initialize() are 0 to {len(groups) - 1}: each "
            "rank must split its model over as many ranks as the others, in one order, and be in one such group. Write "
            'mesh = init_device_mesh(device, (data, model), mesh_dim_names=("dp", "tp")) and split over mesh["tp"].'
        )
    return distinct


class ExpertGroup(NamedTuple):
    """The ranks that hold the experts together with this one, and those that hold the same experts.

    Attributes:
        layout: Which ranks hold which experts.
        data_group: The ranks that hold the same experts as this rank, over which these are partitioned.
        ranks: The ranks that hold all experts together.
        transport: Moves bytes between the ranks of ``data_group``.
    """

    layout: ModelLayout
    data_group: Group
    ranks: Group
    transport: Transport

    def close(self) -> None:
        """Close the transport and the groups."""
        self.transport.close()
        for group in (self.data_group, self.ranks):
            destroy_group(group.process_group)


class TransportWithExperts(ForwardingTransport):
    """The transport of an engine whose experts have one of their own, which is kept in step with it.

    Args:
        inner: The transport of what is no expert.
        experts: That of the experts.
    """

    def __init__(self, inner: Transport, experts: Transport) -> None:
        super().__init__(inner)
        self._experts = experts

    def staging_bytes(self) -> int:
        """Return the bytes of both."""
        return self._inner.staging_bytes() + self._experts.staging_bytes()

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """Sum over the ranks of the inner transport, and end what is under way on both."""
        self._experts.all_reduce_scalars(values[:1], label)
        return self._inner.all_reduce_scalars(values, label)

    def progress(self) -> None:
        """Let both proceed."""
        self._inner.progress()
        self._experts.progress()

    def check_order(self) -> None:
        """Check both."""
        self._inner.check_order()
        self._experts.check_order()

    def fence(self) -> None:
        """Return when no rank reads memory of either."""
        self._inner.fence()
        self._experts.fence()


def open_expert_group(
    group: Group, watchdog: Watchdog | None, layout: ModelLayout, kind: str, timeout: float
) -> ExpertGroup:
    """Divide the ranks of ``group`` by the experts that they hold. A collective.

    Args:
        group: All ranks.
        watchdog: The watchdog of all ranks.
        layout: Which of them hold which experts.
        kind: ``auto``, ``shm`` or ``gloo``: the configuration's ``comm.transport``.
        timeout: Seconds after which a stalled operation is an error.
    """
    data_group, ranks = (group.subgroup(members, watchdog) for members in (layout.data_group, layout.model_group))
    return ExpertGroup(layout, data_group, ranks, open_transport(data_group, kind, timeout))


def open_model_groups(group: Group, layout: ModelLayout, kind: str, timeout: float) -> Replicas:
    """Divide the ranks of ``group`` by model groups, and by data groups. A collective.

    Args:
        group: All ranks.
        layout: Which of them hold which slices.
        kind: ``auto``, ``shm`` or ``gloo``: the configuration's ``comm.transport``.
        timeout: Seconds after which a stalled operation is an error.

    Returns:
        A replica for each slice: the ranks of a data group. Counterparts hold one model together.
    """
    place = layout.data_group.index(group.rank)
    ranks_per_replica = len(layout.data_group)
    # What replicas number consecutively are the places within data groups, one data group behind the other.
    numbers = ReplicaLayout(layout.number * ranks_per_replica + place, len(layout.model_group), ranks_per_replica)
    return open_replicas(group, numbers, kind, timeout, layout.data_group, layout.model_group)
