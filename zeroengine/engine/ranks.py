"""The ranks of an engine, and what moves bytes between them."""

from __future__ import annotations

from dataclasses import dataclass

from zeroengine.comm.forwarding_transport import ForwardingTransport
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.logged_transport import log_collectives
from zeroengine.comm.model_group import ExpertGroup, TransportWithExperts
from zeroengine.comm.packing import ErrorFeedback
from zeroengine.comm.quantized_transport import QuantizedGather, QuantizedReduce
from zeroengine.comm.replicas import RankSums, Replicas, SumsOverReplicas
from zeroengine.engine.setup import EngineSetup
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.degrees import ranks_of_level
from zeroengine.partition.replicas import ReplicaLayout
from zeroengine.partition.unit_layout import DegreeRules
from zeroengine.runtime.unit import Unit


@dataclass(frozen=True)
class Ranks:
    """The ranks of one engine, and what moves bytes between them.

    Attributes:
        group: All ranks.
        replicas: The replicas that ``local_steps`` divides them into, each of which holds the states once; of a split
            model the ranks that hold the same slices, each of which is one. None: all ranks are one.
        rules: Over how many ranks each unit is partitioned.
        transport: Moves bytes between the ranks of ``replica_group``.
        sums: Sums small vectors over all ranks.
        quantized_gather: Gathers parameters inexactly; None if nothing asks for it.
        quantized_reduce: Sums gradients inexactly, as the reduce channel of ``transport``; None likewise.
        plain_transport: What ``transport`` stands around: what moves the bytes.
        experts: The ranks that experts are split over; None: they are not.
    """

    group: Group
    replicas: Replicas | None
    rules: DegreeRules
    transport: Transport
    sums: RankSums
    quantized_gather: QuantizedGather | None
    quantized_reduce: QuantizedReduce | None
    plain_transport: Transport
    experts: ExpertGroup | None = None

    def transport_of(self, unit: UnitPlan | Unit) -> Transport:
        """Return what moves bytes between the ranks that a unit is partitioned over."""
        return self.experts.transport if self.experts is not None and unit.expert_ranks else self.transport

    def data_group(self, unit: UnitPlan | Unit) -> Group:
        """Return the ranks that a unit is partitioned over."""
        return self.experts.data_group if self.experts is not None and unit.expert_ranks else self.replica_group

    def model_group(self, unit: Unit) -> Group:
        """Return the ranks that hold a unit whose parameters are split together with this one."""
        if self.experts is not None and unit.expert_ranks:
            return self.experts.ranks
        assert self.replicas is not None
        return self.replicas.counterparts

    def slice_number(self, unit: Unit) -> int:
        """Return the number of this rank's slices of a unit; 0 if it is not split."""
        if not unit.is_split:
            return 0
        if self.experts is not None and unit.expert_ranks:
            return self.experts.layout.number
        return self.replica_layout.replica

    @property
    def replica_group(self) -> Group:
        """The ranks that the states are partitioned over: those of this rank's replica."""
        return self.group if self.replicas is None else self.replicas.group

    def holders(self, unit: UnitPlan | Unit) -> Group:
        """Return the ranks that have the same values of a unit's parameters."""
        return self.data_group(unit) if unit.is_split else self.group

    @property
    def replica_layout(self) -> ReplicaLayout:
        """Which ranks are in which replica."""
        if self.replicas is None:
            return ReplicaLayout(self.group.rank, 1, self.group.world_size)
        return self.replicas.layout


def connect_ranks(setup: EngineSetup, group: Group, replicas: Replicas | None, transport: Transport) -> Ranks:
    """Choose the channels of ``transport``, and put around them what is configured. A collective.

    Args:
        setup: What the engine is made from.
        group: All ranks.
        replicas: The replicas of ``local_steps``, if there are several.
        transport: Moves bytes between the ranks of the replica.
    """
    config, plans, zero, plain_transport = setup.config, setup.plans, setup.config.zero_optimization, transport
    rules = DegreeRules.of_settings(zero, transport.world_size)
    sharing = group if replicas is None else replicas.group
    # The transport may choose its channels by the degrees, and what follows stands around the chosen ones.
    degrees = tuple(dict.fromkeys(rules.of_unit(plan) for plan in plans if not plan.expert_ranks))
    transport = transport.open_groups(
        degrees, sharing, ranks_of_level(transport.rank, 1, config.sequence_parallel_size)
    )
    experts = setup.experts
    if experts is not None:
        of_experts = tuple(dict.fromkeys(rules.of_unit(plan) for plan in plans if plan.expert_ranks))
        experts = experts._replace(transport=experts.transport.open_groups(of_experts, experts.data_group))
    if config.comms_logger.enabled and group.rank == 0:
        transport = log_collectives(transport, config.comms_logger, setup.partition_undo.hooks)
        if experts is not None:
            # Other ranks have the same experts, so these collectives have a table of their own.
            logged = log_collectives(experts.transport, config.comms_logger, setup.partition_undo.hooks, "experts")
            experts = experts._replace(transport=logged)
    has_peers = transport.world_size > 1
    quantized_reduce = None
    if zero.gradient_bits is not None and has_peers:
        loco = zero.zeropp_loco_param
        feedback = None if loco is None else ErrorFeedback(loco.err_beta, loco.reset_T)
        is_gathered = any(rules.of_unit(plan).optimizer > 1 for plan in plans)
        # A mixture exists only with `degrees.per_unit`. See "Hops" in quantized_transport.py.
        all_reduces = transport.reduces_by_levels or not is_gathered
        quantized_reduce = QuantizedReduce(transport, zero.gradient_bits, feedback, group.device, all_reduces)
        transport = ForwardingTransport(transport, quantized_reduce)
    if experts is not None:
        transport = TransportWithExperts(transport, experts.transport)
    quantizes = has_peers and any(zero.quantizes_gathers(plan.trainable) for plan in plans)
    quantized_gather = QuantizedGather(transport) if quantizes else None
    sums: RankSums = transport if replicas is None else SumsOverReplicas(transport, replicas)
    return Ranks(group, replicas, rules, transport, sums, quantized_gather, quantized_reduce, plain_transport, experts)
