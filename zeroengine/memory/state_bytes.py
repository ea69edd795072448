"""Predict the bytes that a rank holds of every state, by the arithmetic that the engine allocates with.

``predict_states`` allocates nothing. The four states are exact. The buffers ("buckets", "gathered", "staging") are the
most that the engine allocates; how many of them a step needs depends on how fast the other ranks and the disk are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from zeroengine.comm.host_layout import HostLayout
from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.comm.transports.choose import TRANSPORTS
from zeroengine.comm.transports.single_process import SingleProcessTransport
from zeroengine.config import Config
from zeroengine.config.fields import CHOSEN
from zeroengine.errors import ZeroEngineError
from zeroengine.memory.checkpoint_copy import checkpoint_copy_bytes
from zeroengine.memory.gathered_bytes import GatheredUnit, most_gathered_bytes
from zeroengine.memory.gradient_buffer_bytes import (
    MAX_IN_FLIGHT,
    GradientFlow,
    count_gradient_buffers,
    gradient_positions,
    received_bytes,
    staging_buffer_bytes,
)
from zeroengine.memory.optimizer_bytes import predict_optimizer
from zeroengine.memory.optimizer_state import OptimizerProbe
from zeroengine.memory.outer_bytes import exchange_bytes, outer_element_sizes, piece_numel, received_exchange_bytes
from zeroengine.memory.quantized_bytes import kept_bytes, transient_bytes
from zeroengine.memory.transient_bytes import most_at_start, receive_bytes
from zeroengine.memory.two_level_bytes import two_level_bytes
from zeroengine.memory.unit_bytes import UnitBytes, average_bytes, units_of_plans, value_bytes
from zeroengine.offload.interfaces import Medium, padded_nbytes
from zeroengine.offload.placement_plan import CPU_MEMORY, PlacementPlan, can_gather_ahead, plan_placement
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.unit_layout import DegreeRules
from zeroengine.runtime.scheduling import prefetch_limits

STATES = ("parameters", "gradients", "master", "optimizer")
BUFFERS = ("buckets", "gathered", "staging", "quantized")


@dataclass(frozen=True)
class RankTopology:
    """What the bytes of states depend on beside the model and the configuration.

    Attributes:
        world_size: The number of ranks that hold the states once: all, or those of a replica of ``local_steps``.
        device: The kind of device that the model computes on.
        transport: The name of the transport, of ``comm.transports.choose.TRANSPORTS``.
        ranks_per_host: The ranks of each host, where a transport adds their values first.
        num_replicas: The number of replicas of ``local_steps``.
        replica_transport: The name of the transport between them.

    Raises:
        ZeroEngineError: A value is not one of these.
    """

    world_size: int
    device: Literal["cpu", "cuda"]
    transport: str
    ranks_per_host: int = 1
    num_replicas: int = 1
    replica_transport: str = SingleProcessTransport.name

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ZeroEngineError(
                f"RankTopology: world_size is the number of ranks, at least 1; found {self.world_size}"
            )
        if self.device not in ("cpu", "cuda"):
            raise ZeroEngineError(f'RankTopology: device is "cpu" or "cuda", found {self.device!r}')
        for name in ("transport", "replica_transport"):
            if (value := getattr(self, name)) not in TRANSPORTS:
                raise ZeroEngineError(f"RankTopology: {name} is one of {', '.join(TRANSPORTS)}; found {value!r}")

    @property
    def traits(self) -> type[TransportTraits]:
        """The class of the transport. A single rank has none of those between ranks."""
        return TRANSPORTS[self.transport] if self.world_size > 1 else SingleProcessTransport

    def adds_by_host(self, units: Sequence[UnitBytes]) -> bool:
        """Return whether the ranks of each host add their values of these units before any go to other hosts."""
        if not self.traits.adds_by_host or not 1 < self.ranks_per_host < self.world_size:
            return False
        layout = HostLayout(0, self.world_size // self.ranks_per_host, self.ranks_per_host)
        return not layout.unfit(unit.degrees for unit in units)


@dataclass(frozen=True)
class StateBytes:
    """The bytes of one rank, by state, as in ``engine.memory()`` after a step.

    The shards of all ranks have equal sizes. Only optimizers of torch keep no state for padding, which lies in the
    shards of the last ranks, and a step count for each parameter that a shard has a part of. Their bytes are those of
    rank 0, whose shards have no padding at their ends. Where they update whole parameters, these are the parameters
    that rank 0 owns, and another rank may own one more.

    Attributes:
        device: Bytes in the device's memory of "parameters", "gradients", "master", "optimizer" and, at their most,
            "buckets", "gathered", "staging" and "quantized".
        cpu: Bytes in CPU memory by the same names, if the device is a GPU.
        nvme: Bytes of the four states that are on a disk.
        peak_device_extra: Bytes of the device's memory beyond the sum of ``device`` at the worst moment. Such moments:
            ``initialize``, where the model's own values are still there beside the units that were made of them; a
            backward, where NCCL receives sums into temporary memory; and an update (``OptimizerBytes.transient``). Not
            counted are the temporaries of torch's own optimizers and of Muon's iteration, and of the initialization of
            ``meta_init``.
        peak_cpu_extra: Likewise of CPU memory, if the device is a GPU: 0, or the values of a model on the CPU.
        disk_files: Bytes of this rank's files on the disk, which hold whole blocks.
        shared_pages: Bytes of ``device["gathered"]`` that take no memory of their own, because shared memory maps the
            pages of the other ranks.
        checkpoint_copy: The most bytes of CPU memory that ``checkpoint.async_save`` takes for the copy that it writes
            from.
        snapshot: Likewise the bytes of its part of a snapshot, if any are taken (``snapshots``).
    """

    device: Mapping[str, int]
    cpu: Mapping[str, int]
    nvme: Mapping[str, int]
    peak_device_extra: int
    peak_cpu_extra: int
    disk_files: int = 0
    shared_pages: int = 0
    checkpoint_copy: int = 0
    snapshot: int = 0

    @property
    def device_total(self) -> int:
        """Bytes of the device's memory, without what is transient."""
        return sum(self.device.values())

    @property
    def cpu_total(self) -> int:
        """Bytes of CPU memory, if the device is a GPU."""
        return sum(self.cpu.values())


# Bytes by location and state. None is the device.
_Ledger = Counter[tuple[str | None, str]]


def planned_units(
    plans: Sequence[UnitPlan], config: Config, topology: RankTopology
) -> tuple[list[UnitBytes], PlacementPlan]:
    """Return what a rank will hold of each unit, and where. See ``predict_states`` for the arguments."""
    world_size, align = topology.world_size, topology.traits.shard_align_bytes
    rules = DegreeRules.of_settings(config.zero_optimization, world_size)
    placement = plan_placement(plans, rules, config, world_size, align, has_device_memory=topology.device == "cuda")
    return units_of_plans(plans, rules, config, world_size, align, placement), placement


def predict_states(
    plans: Sequence[UnitPlan],
    config: Config,
    topology: RankTopology,
    optimizer: torch.optim.Optimizer | OptimizerProbe | None = None,
) -> StateBytes:
    """Return the bytes that each rank will hold of every state. Nothing is allocated.

    Args:
        plans: The units, from ``partition.cut.cut_units``. The model may be on the meta device.
        config: The resolved configuration, with a number as stage and without "auto" as a device.
        topology: The ranks, the device and the transport.
        optimizer: The optimizer that is passed to ``initialize``, or what is known of it. None: that of the
            configuration, or AdamW where it names none. The type "Muon" divides the units, and is passed.

    Raises:
        ZeroEngineError: The optimizer of the configuration cannot be made, or a stage or device is "auto".
    """
    zero = config.zero_optimization
    if CHOSEN in (zero.stage, zero.offload_optimizer.device, zero.offload_param.device):
        raise ZeroEngineError(
            'predict_states: zero_optimization has "auto" as stage or device, which initialize chooses by free memory; '
            "write each stage and device to compare"
        )
    on_gpu, traits = topology.device == "cuda", topology.traits
    units, placement = planned_units(plans, config, topology)
    ledger: _Ledger = Counter()
    probe = optimizer if isinstance(optimizer, OptimizerProbe) else OptimizerProbe(optimizer, config, plans)
    experts_have_peers = any(plan.expert_ranks > 1 for plan in plans)
    kept_among = {"data", *["experts"] * experts_have_peers} if traits.keeps_memory else set[str]()
    kept_among |= {"model"} if TRANSPORTS[topology.replica_transport].keeps_memory else set()
    update = predict_optimizer(units, probe, kept_among=kept_among)
    for unit, state in zip(units, update.states, strict=True):
        ledger[placement.param_location if unit.shard_offloaded else None, "parameters"] += unit.shard_bytes
        ledger[None, "parameters"] += unit.secondary_bytes
        if unit.gradients is not None:
            location = placement.optimizer_location if unit.states_offloaded else None
            ledger[location if unit.gradients.is_offloaded else None, "gradients"] += unit.gradient_bytes
            if unit.plan.has_master:
                ledger[location, "master"] += unit.optimizer_numel * unit.master_dtype.itemsize
            outer = sum(outer_element_sizes(unit, config)) * piece_numel(unit, topology.world_size)
            ledger[location, "optimizer"] += state.nbytes + outer + unit.optimizer_numel * average_bytes(config)

    flows = [_flow(unit, topology.world_size) for unit in units if unit.gradients is not None]
    accumulates = config.manual_accumulation or config.micro_steps_in_mean > 1
    buffers = count_gradient_buffers(flows, zero.reduce_bucket_size or 0, at_once=topology.world_size == 1)
    buckets = sum(count * numel * dtype.itemsize for (numel, dtype), count in buffers.items())
    # Without peers nothing says that a reduce is done.
    num_reducing = 0 if topology.world_size == 1 else MAX_IN_FLIGHT if traits.has_peers else len(flows)
    buckets += staging_buffer_bytes(flows, accumulates=accumulates, num_reducing=num_reducing, on_stream=on_gpu)
    gathered = _most_gathered(units, config, topology, placement)
    ledger[None, "buckets"] += buckets
    ledger[None, "gathered"] += gathered
    if adds_by_host := topology.adds_by_host(units):
        ledger[None, "staging"] += two_level_bytes(
            units, topology.world_size, topology.ranks_per_host, gathered, zero.gradient_bits
        )
    else:
        # Packed slices arrive in passing. Whether sums of whole gradients are packed depends on what is gathered.
        exact = [flow for flow in flows if not (zero.gradient_bits and flow.format.is_sharded)]
        ledger[CPU_MEMORY, "staging"] += received_bytes(exact, topology.world_size, buffers, traits)
    ledger[None, "quantized"] += kept_bytes(
        units, config, topology.world_size, keeps_packets=traits.keeps_memory, sums_by_host=adds_by_host
    )
    _add_staging(ledger, units, config, topology, placement)
    ledger[None, "staging"] += update.exchange
    if config.local_steps is not None:
        exchange = units, topology.world_size, topology.num_replicas
        ledger[None, "staging"] += exchange_bytes(*exchange)
        between = TRANSPORTS[topology.replica_transport]
        ledger[CPU_MEMORY, "staging"] += received_exchange_bytes(*exchange, between)

    device = {name: ledger[None, name] for name in (*STATES, *BUFFERS)}
    host = {name: ledger[CPU_MEMORY, name] for name in (*STATES, "staging")}
    if not on_gpu:
        device["staging"] += host["staging"]
    received = receive_bytes(units, topology.world_size, traits, accumulates=accumulates)
    received += transient_bytes(units, config, topology.world_size, sums_by_host=adds_by_host)
    # What packets hold is written to full buffers, which then show no memory of other ranks.
    maps_pages = placement.param_location is None and not zero.quantizes_gathers(trainable=False)
    on_disk = [path for path in placement.bytes_by_location if path]
    copy_bytes = checkpoint_copy_bytes(units, config, topology.world_size, topology.num_replicas, update.states)
    return StateBytes(
        device=device,
        cpu=host if on_gpu else {},
        nvme={name: sum(ledger[path, name] for path in on_disk) for name in STATES},
        peak_device_extra=max(
            received,
            most_at_start(units, topology.device) - sum(device.values()),
            update.transient - device["gathered"],
            0,
        ),
        peak_cpu_extra=sum(value_bytes(unit.plan, "cpu") for unit in units) if on_gpu else 0,
        disk_files=sum(placement.bytes_by_location[path] for path in on_disk),
        shared_pages=gathered if traits.shares_pages and maps_pages else 0,
        checkpoint_copy=copy_bytes if config.checkpoint.async_save and not on_disk else 0,
        snapshot=copy_bytes if config.snapshots.every_seconds is not None else 0,
    )


def _flow(unit: UnitBytes, world_size: int) -> GradientFlow:
    assert unit.gradients is not None
    shard_numel = unit.layout.shard_numel(unit.degrees.gradients)
    slice_numel = unit.layout.numel // unit.num_sum_slices(world_size)
    return GradientFlow(unit.layout.numel, shard_numel, unit.gradients, *gradient_positions(unit.plan), slice_numel)


def _most_gathered(units: Sequence[UnitBytes], config: Config, topology: RankTopology, placement: PlacementPlan) -> int:
    overlaps = topology.traits.overlaps
    medium: Medium = "cpu" if placement.param_location == CPU_MEMORY else "nvme"
    shards_gather_ahead = can_gather_ahead(medium, topology.world_size, overlaps=overlaps)
    releasable = [
        GatheredUnit(unit.plan, unit.layout.numel, shards_gather_ahead if unit.shard_offloaded else overlaps)
        for unit in units
        if unit.is_releasable
    ]
    reads_shards = any(unit.shard_offloaded for unit in units)
    limits = prefetch_limits(config.zero_optimization, overlaps=overlaps, reads_shards=reads_shards)
    return most_gathered_bytes(releasable, limits)


def _add_staging(
    ledger: _Ledger, units: Sequence[UnitBytes], config: Config, topology: RankTopology, placement: PlacementPlan
) -> None:
    """Add the buffers between the stores and the computation."""
    ledger[CPU_MEMORY, "staging"] += placement.pipeline_bytes
    num_buffers = config.zero_optimization.offload_param.buffer_count
    # A single rank reads shards straight into the full buffer.
    if topology.world_size > 1:
        ledger[None, "staging"] += num_buffers * placement.largest_shard_bytes
    if topology.device == "cpu":
        return
    # Every transfer between a GPU and a disk passes through the host. Each store has buffers of its own.
    sizes: dict[str | None, list[int]] = {}
    for unit in units:
        if unit.shard_offloaded:
            sizes.setdefault(placement.param_location, []).append(unit.shard_bytes)
        if unit.gradients is not None and unit.gradients.is_offloaded:
            sizes.setdefault(placement.optimizer_location, []).append(unit.gradient_bytes)
    for path, transfers in sizes.items():
        ledger[CPU_MEMORY, "staging"] += _bounce_buffer_bytes(transfers, num_buffers) if path else 0


def _bounce_buffer_bytes(sizes: Sequence[int], num_buffers: int) -> int:
    """Return the bytes of the buffers of ``StagedDiskStore`` if no transfer is ever done before the next begins."""
    buffers: list[int] = []
    for size in [*sizes, *sizes[::-1]] * 2:
        if sum(nbytes >= size for nbytes in buffers) < num_buffers:
            buffers.append(padded_nbytes(size))
    return sum(buffers)
