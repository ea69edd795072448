"""The seconds of a training step, from what is traced and what the machine achieves.

[Note: What is modeled]
compute   each operation takes the longer of its arithmetic and its bytes on a GPU, and the launches by the host may
          take longer than all of them; on a CPU these add up
gather    see ``step_collectives`` for which there are, and ``collective_seconds`` for the seconds of each. A transport
          that overlaps hides them behind the computation of the same pass, but for the first
reduce    the copy of gradients into buckets, and their sums. A transport that overlaps hides the sums behind the
          backward, but for the last. With local_steps also the exchange between replicas, shared out among the steps of
          a round
network   between nodes the gathers of a backward and its sums take turns, so only what the sums leave of the backward
          hides the gathers. On CPUs the threads that move bytes between nodes take the cores' time (see
          ``CPU_HIDDEN_SHARE``)
update    reads gradients for the norm, and reads and writes states once, those of an outer step of local_steps too;
          what rules on whole matrices exchange and compute at owners is left out
exchange  parts of sequences, for attention, among the ranks that share samples; sums of activations among those that
          have the slices of layers; tokens among those that have the experts. Nothing hides them
offload   transfers of a step that the pass they belong to does not hide; see "Where a state lives" in docs/design.md
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroengine.comm.transports.choose import expected_transport
from zeroengine.config import Config
from zeroengine.memory.outer_bytes import piece_numel
from zeroengine.memory.state_bytes import RankTopology, StateBytes, planned_units
from zeroengine.memory.unit_bytes import UnitBytes
from zeroengine.optim.replica_mean import sum_dtype
from zeroengine.plan.seconds.collective_seconds import HostCollectives, RingCollectives, Seconds, collectives_of
from zeroengine.plan.seconds.machine import MAPPED_BYTES, Machine
from zeroengine.plan.seconds.step_collectives import StepCollectives
from zeroengine.plan.trace.activations import MicroStep, OperationCount
from zeroengine.plan.trace.model_facts import ModelFacts

# The share of a computation on CPUs that hides what crosses the network meanwhile. Measured with two hosts of two ranks
# on two cores (docs/benchmarks.md, "Two hosts"): 0 to 0.9, a third in most runs.
CPU_HIDDEN_SHARE = 1 / 3


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of a rank. All but ``compute`` count what the computation does not hide.

    Attributes:
        compute: Forwards and backwards of all micro-steps.
        gather: Exposed all-gathers of parameters.
        reduce: Exposed reductions of gradients, and their copies into buckets.
        update: The norm of the gradient and the optimizer's update.
        offload: Exposed transfers between the device, the host and the disk.
        exchange: Exchanges of parts of sequences, of activations of split layers and of tokens for experts.
    """

    compute: float
    gather: float
    reduce: float
    update: float
    offload: float
    exchange: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds of the whole step."""
        return self.compute + self.gather + self.reduce + self.update + self.offload + self.exchange


def topology_of(machine: Machine, config: Config) -> RankTopology:
    """Return the ranks, the device and the transport of a run on ``machine``, or of one replica of ``local_steps``.

    Of a split model these are the ranks with the same slices.
    """
    replica = machine_of_replica(machine, config)
    num_replicas = machine.world_size // replica.world_size
    size, per_node = replica.world_size, replica.ranks_per_node
    # The ranks of a node that hold the same elements, in different replicas. A model group has consecutive ranks.
    alike = 1 if machine.ranks_per_node % size else machine.ranks_per_node // size
    if config.local_steps is None:
        alike = math.gcd(num_replicas, machine.ranks_per_node)
    transport, between = (
        expected_transport(machine.device, config.comm.transport, *hosts).name
        for hosts in ((replica.nodes, per_node), (num_replicas // alike, alike))
    )
    return RankTopology(size, machine.device, transport, per_node, num_replicas, between)


def machine_of_replica(machine: Machine, config: Config) -> Machine:
    """Return the part of ``machine`` that one replica of ``local_steps`` runs on; without these all of it.

    Of a split model this is the part of the ranks with the same slices.
    """
    machine = machine_of_slice(machine, max(config.tensor_parallel.autotp_size, 1))
    size, per_node = config.replica_ranks(machine.world_size), machine.ranks_per_node
    if size <= per_node:
        return dataclasses.replace(machine, nodes=1, ranks_per_node=size)
    # A replica that ends within a machine is taken for one whose ranks are all on machines of their own.
    per_node = per_node if size % per_node == 0 else 1
    return dataclasses.replace(machine, nodes=size // per_node, ranks_per_node=per_node)


def machine_of_slice(machine: Machine, num_slices: int) -> Machine:
    """Return the part of ``machine`` that has the same slice, of so many that consecutive ranks have.

    The parts of one node share its network.
    """
    per_node = machine.ranks_per_node // num_slices if machine.ranks_per_node % num_slices == 0 else 1
    rates = dataclasses.replace(machine.rates, node_link=machine.rates.node_link * per_node / machine.ranks_per_node)
    nodes = machine.world_size // num_slices // per_node
    return dataclasses.replace(machine, nodes=nodes, ranks_per_node=per_node, rates=rates)


def outer_step_seconds(units: Sequence[UnitBytes], config: Config, machine: Machine) -> float:
    """Return the seconds of the exchange of an outer step of ``local_steps``, as a part of each step of the round."""
    size = config.replica_ranks(machine.world_size)
    num_replicas = machine.world_size // size
    if config.local_steps is None or num_replicas == 1:
        return 0.0
    nbytes = sum(piece_numel(unit, size) * sum_dtype(unit.master_dtype).itemsize for unit in units)
    seconds = RingCollectives(machine).all_reduce(nbytes, num_replicas, size)
    return seconds / config.local_steps.steps


def predict_step(model: ModelFacts, config: Config, micro: MicroStep, states: StateBytes, machine: Machine) -> StepTime:
    """Predict the seconds of one step: all micro-steps and the update.

    Args:
        model: The model.
        config: The resolved configuration, with a number as stage.
        micro: One micro-step of it.
        states: The bytes of its states, for what an update reads and writes.
        machine: The machine. A rate of 0 that is needed, as of a disk that is not there, gives infinity.
    """
    topology = topology_of(machine, config)
    zero = config.zero_optimization
    units, _ = planned_units(model.plans(config), config, topology)
    accumulation = config.micro_steps_in_mean
    forward, backward = (_compute_seconds(operations, machine) for operations in (micro.forward, micro.backward))
    replica = machine_of_replica(machine, config)
    # Experts are partitioned over other ranks.
    experts = RingCollectives(machine_of_slice(machine, config.expert_parallel.size))
    seconds = {False: collectives_of(units, config, topology, replica), True: experts}
    step = StepCollectives.of_units(units, accumulation)
    share = 0.0
    if topology.traits.overlaps and zero.overlap_comm:
        share = CPU_HIDDEN_SHARE if machine.device == "cpu" and replica.nodes > 1 else 1.0
    gather, reduce = _exposed_seconds(step, seconds, share * forward, share * backward)
    # Every micro-step copies its gradients, whenever they are reduced.
    trained = (*step.sharded, *step.whole)
    reduce += accumulation * sum(_copy_bytes(unit) for unit in trained) / machine.rates.memory
    reduce += outer_step_seconds(units, config, machine)
    update, offload = _update_seconds(units, states, machine)
    offload += _param_offload_seconds(units, machine, config, accumulation, forward + backward)
    # All ranks of a node may exchange with other nodes at once.
    rings, num_ranks = RingCollectives(machine), max(config.sequence_parallel_size, config.expert_parallel.size)
    link = rings.rate(machine.rates.link, num_ranks, machine.ranks_per_node)
    exchange = accumulation * micro.exchanged_bytes / link if micro.exchanged_bytes else 0.0
    if micro.num_sums:
        nbytes = micro.summed_bytes // micro.num_sums
        seconds_of_sum = rings.all_reduce(nbytes, config.tensor_parallel.autotp_size, 1)
        exchange += accumulation * micro.num_sums * seconds_of_sum
    return StepTime(accumulation * (forward + backward), gather, reduce, update, offload, exchange)


def _exposed_seconds(
    step: StepCollectives,
    collectives: Mapping[bool, RingCollectives | HostCollectives],
    forward: float,
    backward: float,
) -> tuple[float, float]:
    """Return the seconds of the gathers and of the sums of a step that the computation does not hide.

    Args:
        step: What is gathered and summed.
        collectives: The seconds of each, of units of experts that are split (True), and of others.
        forward: The seconds of each forward that hide communication; 0: it hides none.
        backward: Likewise of each backward.
    """

    def exposed(times: Sequence[Seconds], hidden_behind: float) -> float:
        own, hidden = sum(time.own for time in times), sum(time.hidden for time in times)
        # The first gather has nothing to hide behind, and neither has the last sum.
        least = times[0].hidden if times else 0.0
        return own + max(least, hidden - hidden_behind)

    def seconds_of(unit: UnitBytes) -> RingCollectives | HostCollectives:
        return collectives[unit.plan.expert_ranks > 0]

    sharded, whole = ([seconds_of(unit).reduce(unit) for unit in reversed(part)] for part in (step.sharded, step.whole))
    reduce = step.micro_steps * exposed(sharded, backward) + exposed(whole, backward)
    first, later, in_backward, updates = (
        [seconds_of(gather.unit).gather(gather) for gather in part]
        for part in (step.first, step.later, step.backward, step.updates)
    )
    hides_gathers = backward
    if any(time.crosses for time in in_backward):
        hides_gathers = max(0.0, backward - sum(time.hidden for time in sharded if time.crosses))
    gather = exposed(first, forward) + (step.micro_steps - 1) * exposed(later, forward)
    gather += step.micro_steps * exposed(in_backward, hides_gathers)
    return gather + exposed(updates, forward), reduce


def _compute_seconds(operations: Sequence[OperationCount], machine: Machine) -> float:
    rates = machine.rates
    on_gpu = machine.device == "cuda"
    device = host = 0.0
    for operation in operations:
        dtype, length = operation.dtype, operation.attention_length
        arithmetic = operation.flops / (rates.attention_rate(dtype, length) if length else rates.matmul[dtype])
        memory = operation.nbytes / rates.elementwise[dtype]
        # On a GPU small products are bound by memory. On a CPU their operands come from caches.
        seconds = max(arithmetic, memory) if on_gpu else arithmetic or memory
        # The C library maps memory of this size anew.
        if rates.new_memory and operation.new_bytes >= MAPPED_BYTES:
            seconds += operation.new_bytes / rates.new_memory
        device += operation.count * seconds
        host += operation.count * rates.dispatch
    # A GPU works off a queue that the host fills.
    return max(device, host) if on_gpu else device + host


def _copy_bytes(unit: UnitBytes) -> int:
    """Return the bytes that the copy of a unit's gradients into its bucket reads and writes."""
    assert unit.gradients is not None
    target = unit.gradients.reduce_dtype if unit.gradients.is_sharded else unit.gradients.dtype
    return unit.plan.numel * (unit.plan.dtype.itemsize + target.itemsize)


def _update_seconds(units: Sequence[UnitBytes], states: StateBytes, machine: Machine) -> tuple[float, float]:
    """Return the seconds of the update, and of the transfers that it does not hide."""
    rates = machine.rates
    trained = [unit for unit in units if unit.gradients is not None]
    numel = sum(unit.optimizer_numel for unit in trained)
    by_place = (states.device, states.cpu, states.nvme)
    moments = sum(place.get("optimizer", 0) for place in by_place)
    masters = sum(unit.optimizer_numel * unit.master_dtype.itemsize for unit in trained)
    gradients = sum(unit.optimizer_numel * unit.gradients.dtype.itemsize for unit in trained if unit.gradients)
    low_precision = sum(unit.optimizer_numel * unit.plan.dtype.itemsize for unit in trained if unit.plan.has_master)
    # The norm reads the gradients once more. Where the parameters are whole, users may have written into them, and
    # their copy in low precision is read too.
    nbytes = 2 * (masters + moments) + 2 * gradients + low_precision
    nbytes += sum(
        unit.optimizer_numel * unit.plan.dtype.itemsize
        for unit in trained
        if unit.plan.has_master and unit.degrees.parameters == 1
    )
    if not numel:
        return 0.0, 0.0
    offloaded = sum(unit.optimizer_numel for unit in trained if unit.states_offloaded) / numel
    in_memory, on_host = machine.rates.memory, rates.host_memory / machine.ranks_per_node
    if machine.device == "cpu":
        on_host = in_memory
    update = nbytes * ((1 - offloaded) / in_memory + offloaded / on_host)
    # Gradients go to the host and new parameters come back, beside the update.
    to_device = low_precision or masters
    transfer = (
        offloaded * max(gradients, to_device) / rates.host_link if machine.device == "cuda" and offloaded else 0.0
    )
    transfer += _disk_seconds(states, machine, gradients if states.nvme.get("gradients") else 0)
    return update, max(0.0, transfer - update)


def _disk_seconds(states: StateBytes, machine: Machine, gradients: int) -> float:
    """Return the seconds of an update's transfers from and to the disk that the ranks of a node share."""
    moved = sum(states.nvme.get(name, 0) for name in ("master", "optimizer"))
    published = states.nvme.get("parameters", 0)
    # In fp32 the parameters are the master weights. Otherwise their rounded copy is written.
    if not states.nvme.get("master", 0):
        moved, published = moved + published, 0
    if not moved:
        return 0.0
    read, write, both = machine.rates.disk_read, machine.rates.disk_write, machine.rates.disk_both
    if not read or not write:
        return float("inf")
    nbytes_read, nbytes_written = moved + gradients, moved + gradients + published
    seconds = nbytes_read / read + nbytes_written / write
    # Reads ahead and writes behind are under way together.
    return machine.ranks_per_node * ((nbytes_read + nbytes_written) / both if both else seconds)


def _param_offload_seconds(
    units: Sequence[UnitBytes], machine: Machine, config: Config, accumulation: int, compute: float
) -> float:
    """Return the exposed seconds of reading offloaded parameter shards for each forward and backward."""
    nbytes = 2 * sum(unit.shard_bytes for unit in units if unit.shard_offloaded)
    place = config.zero_optimization.offload_param.device
    if not nbytes:
        return 0.0
    seconds = nbytes / machine.rates.host_link if machine.device == "cuda" else 0.0
    if place == "nvme":
        read = machine.rates.disk_read / machine.ranks_per_node
        seconds = max(seconds, nbytes / read if read else float("inf"))
    # On a CPU the transfers take the cores' time from the computation, so they hide little.
    hidden = compute if machine.device == "cuda" else 0.0
    return accumulation * max(0.0, seconds - hidden)
