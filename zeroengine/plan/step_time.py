"""The seconds of a training step, from what is traced and what the machine achieves.

[Note: What is modeled]
compute   each operation takes the longer of its arithmetic and its bytes on a GPU, and the launches by the host may
          take longer than all of them; on a CPU these add up
gather    stage 3: each module's units before its forward and its backward; the last of the forward stay. With a
          second copy of the parameters all but the first come from its ranks. Where the optimizer's degree is above
          that of the parameters: each unit after its update. A transport that overlaps hides them behind the
          computation of the same pass, but for the first
reduce    the copy of gradients into buckets, and their sums: in each micro-step at stages 2 and 3, otherwise in the
          last one. A transport that overlaps hides the sums behind the backward, but for the last. With local_steps
          also the exchange between replicas, shared out among the steps of a round
update    reads gradients for the norm, and reads and writes states once
offload   transfers of a step that the pass they belong to does not hide; see "Where a state lives" in docs/design.md
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from zeroengine.config import Config
from zeroengine.offload.placement_plan import plan_placement
from zeroengine.optim.replica_mean import sum_dtype
from zeroengine.partition.unit_layout import DegreeRules
from zeroengine.plan.activations import MicroStep, OperationCount
from zeroengine.plan.machine import MAPPED_BYTES, Machine, Rates
from zeroengine.plan.model_facts import ModelFacts
from zeroengine.plan.outer_bytes import outer_element_sizes, piece_numel
from zeroengine.plan.state_bytes import Setting, StateBytes
from zeroengine.plan.unit_bytes import UnitBytes, units_of_plans


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of a rank. All but ``compute`` count what the computation does not hide.

    Attributes:
        compute: Forwards and backwards of all micro-steps.
        gather: Exposed all-gathers of parameters.
        reduce: Exposed reductions of gradients, and their copies into buckets.
        update: The norm of the gradient and the optimizer's update.
        offload: Exposed transfers between the device, the host and the disk.
    """

    compute: float
    gather: float
    reduce: float
    update: float
    offload: float

    @property
    def total(self) -> float:
        """Return the seconds of the whole step."""
        return self.compute + self.gather + self.reduce + self.update + self.offload


def setting_of(machine: Machine, config: Config) -> Setting:
    """Return the ranks, the device and the transport of a run on ``machine``, or of one replica of ``local_steps``."""
    replica = machine_of_replica(machine, config)
    num_replicas = machine.world_size // replica.world_size
    if replica.world_size == 1:
        return Setting(1, machine.device, "single", num_replicas=num_replicas)
    on_host = replica.nodes == 1 and config.comm.transport != "gloo"
    transport = "nccl" if machine.device == "cuda" else "shm" if on_host else "gloo"
    return Setting(replica.world_size, machine.device, transport, num_replicas=num_replicas)


def machine_of_replica(machine: Machine, config: Config) -> Machine:
    """Return the part of ``machine`` that one replica of ``local_steps`` runs on; without these all of it."""
    size, per_node = config.replica_ranks(machine.world_size), machine.ranks_per_node
    if size <= per_node:
        return dataclasses.replace(machine, nodes=1, ranks_per_node=size)
    # A replica that ends within a machine is taken for one whose ranks are all on machines of their own.
    per_node = per_node if size % per_node == 0 else 1
    return dataclasses.replace(machine, nodes=size // per_node, ranks_per_node=per_node)


def outer_step_seconds(units: Sequence[UnitBytes], config: Config, machine: Machine) -> float:
    """Return the seconds of the exchange of an outer step of ``local_steps``, as a part of each step of the round."""
    size = config.replica_ranks(machine.world_size)
    num_replicas = machine.world_size // size
    if config.local_steps is None or num_replicas == 1:
        return 0.0
    nbytes = sum(piece_numel(unit, size) * sum_dtype(unit.master_dtype).itemsize for unit in units)
    seconds = Collectives(machine).all_reduce(nbytes, num_replicas, size)
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
    setting = setting_of(machine, config)
    zero = config.zero_optimization
    rules = DegreeRules.of_settings(config.zero_optimization, setting.world_size)
    plans, align = model.plans(config), setting.shard_align_bytes
    on_gpu = machine.device == "cuda"
    placement = plan_placement(plans, rules, config, setting.world_size, align, has_device_memory=on_gpu)
    units = units_of_plans(plans, rules, config, setting.world_size, align, placement)
    accumulation = config.micro_steps_in_mean
    forward, backward = (_compute_seconds(operations, machine) for operations in (micro.forward, micro.backward))
    collectives = Collectives(machine_of_replica(machine, config))
    overlaps = setting.overlaps and zero.overlap_comm

    def exposed(seconds: Sequence[float], hidden_behind: float) -> float:
        if not overlaps or not seconds:
            return sum(seconds)
        # The first gather has nothing to hide behind, and neither has the last reduce.
        return max(seconds[0], sum(seconds) - hidden_behind)

    gathered = [unit for unit in units if unit.degrees.parameters > 1]
    # A unit of several modules, such as an embedding that is tied to the head, is gathered for each of them.
    uses = [unit for unit in gathered for _ in unit.plan.modules]
    first = [collectives.gather(unit.full_bytes, unit.degrees.parameters) for unit in uses]
    again = [collectives.gather(unit.full_bytes, unit.degrees.secondary or unit.degrees.parameters) for unit in uses]
    kept = again[uses.index(_last_in_forward(model, gathered))] if gathered else 0.0
    gather = exposed(first, forward) + (accumulation - 1) * exposed(again, forward)
    gather += accumulation * max(0.0, exposed(again, backward) - kept)
    updated = [
        unit for unit in units if unit.gradients is not None and unit.degrees.optimizer > unit.degrees.parameters
    ]
    gather += exposed(
        [collectives.gather(unit.full_bytes, unit.degrees.optimizer, unit.degrees.parameters) for unit in updated],
        forward,
    )

    reduce = 0.0
    for sharded, times in ((True, accumulation), (False, 1)):
        trained = [unit for unit in units if unit.gradients is not None and unit.gradients.is_sharded is sharded]
        # Every micro-step copies its gradients, whenever they are reduced.
        reduce += accumulation * sum(_copy_bytes(unit) for unit in trained) / machine.rates.memory
        reduce += times * exposed([collectives.reduce(unit) for unit in reversed(trained)], backward)

    reduce += outer_step_seconds(units, config, machine)
    update, offload = _update_seconds(units, _without_outer_state(units, states, config, machine), machine)
    offload += _param_offload_seconds(units, machine, config, accumulation, forward + backward)
    return StepTime(accumulation * (forward + backward), gather, reduce, update, offload)


def _last_in_forward(model: ModelFacts, units: Sequence[UnitBytes]) -> UnitBytes:
    """Return the unit whose module is registered last. The backward needs it first, so it stays gathered."""
    order = {module: index for index, module in enumerate(model.model.modules())}
    return max(units, key=lambda unit: max((order[module] for module in unit.plan.modules), default=-1))


class Collectives:
    """The seconds of collectives between ranks of a machine."""

    def __init__(self, machine: Machine) -> None:
        self._rates, self._world_size = machine.rates, machine.world_size
        self._ranks_per_node = machine.ranks_per_node

    def _rate(self, link: float, degree: int, within: int) -> float:
        """Return the bytes per second that a rank receives from ``degree // within`` ranks, ``within`` apart."""
        if degree <= self._ranks_per_node:
            return link
        # A ring over several nodes crosses each node's network once, while its ranks use their own links. Ranks that
        # are some ranks apart form that many rings, which share the network.
        return min(link, self._rates.node_link / min(within, self._ranks_per_node))

    def gather(self, nbytes: int, degree: int, within: int = 1) -> float:
        """Return the seconds of an all-gather of shards at ``degree`` into one at ``within``, of ``nbytes`` in all."""
        received = nbytes / within - nbytes / degree
        return self._rates.latency + received / self._rate(self._rates.link, degree, within) if received else 0.0

    def all_reduce(self, nbytes: int, count: int, within: int) -> float:
        """Return the seconds of an all-reduce of ``nbytes`` over ``count`` ranks, ``within`` apart."""
        received = 2 * nbytes * (count - 1) / count
        return self._rates.latency + received / self._rate(self._rates.reduce_link, count * within, within)

    def reduce(self, unit: UnitBytes) -> float:
        """Return the seconds of the reduction of a unit's gradients.

        They are summed among the ranks that hold different slices, and the sums among those that hold the same slice.
        """
        if self._world_size == 1:
            return 0.0
        assert unit.gradients is not None
        nbytes = unit.layout.numel * unit.gradients.reduce_dtype.itemsize
        degree = unit.degrees.gradients if unit.gradients.is_sharded else unit.degrees.optimizer
        seconds = self._rates.latency
        seconds += (nbytes - nbytes / degree) / self._rate(self._rates.reduce_link, degree, 1)
        if degree < self._world_size:
            received = nbytes / degree - nbytes / self._world_size
            seconds += received / self._rate(self._rates.reduce_link, self._world_size, degree)
            seconds += self.gather(nbytes, self._world_size, degree)
        return seconds


def _compute_seconds(operations: Sequence[OperationCount], machine: Machine) -> float:
    rates = machine.rates
    on_gpu = machine.device == "cuda"
    device = host = 0.0
    for operation in operations:
        arithmetic = operation.flops / flop_rate(operation, rates)
        memory = operation.nbytes / rates.elementwise[operation.dtype]
        # On a GPU small products are bound by memory. On a CPU their operands come from caches.
        seconds = max(arithmetic, memory) if on_gpu else (arithmetic or memory) + new_memory_seconds(operation, rates)
        device += operation.count * seconds
        host += operation.count * rates.dispatch
    # A GPU works off a queue that the host fills.
    return max(device, host) if on_gpu else device + host


def flop_rate(operation: OperationCount, rates: Rates) -> float:
    """Return the FLOP per second of an operation."""
    if operation.attention_length:
        return rates.attention_rate(operation.dtype, operation.attention_length)
    return rates.matmul[operation.dtype]


def new_memory_seconds(operation: OperationCount, rates: Rates) -> float:
    """Return the seconds that one operation spends on memory that the C library maps anew."""
    is_mapped = operation.new_bytes >= MAPPED_BYTES and rates.new_memory > 0
    return operation.new_bytes / rates.new_memory if is_mapped else 0.0


def _copy_bytes(unit: UnitBytes) -> int:
    """Return the bytes that the copy of a unit's gradients into its bucket reads and writes."""
    assert unit.gradients is not None
    target = unit.gradients.reduce_dtype if unit.gradients.is_sharded else unit.gradients.dtype
    return unit.plan.numel * (unit.plan.dtype.itemsize + target.itemsize)


def _without_outer_state(
    units: Sequence[UnitBytes], states: StateBytes, config: Config, machine: Machine
) -> StateBytes:
    """Return the bytes of the states without what most updates leave alone: the state of the outer step."""
    size = config.replica_ranks(machine.world_size)
    outer = {
        offloaded: sum(
            sum(outer_element_sizes(unit, config)) * piece_numel(unit, size)
            for unit in units
            if unit.states_offloaded is offloaded
        )
        for offloaded in (False, True)
    }
    if not any(outer.values()):
        return states
    elsewhere = "nvme" if states.nvme.get("optimizer") else "cpu"
    changed = {
        name: getattr(states, name) | {"optimizer": getattr(states, name)["optimizer"] - outer[offloaded]}
        for name, offloaded in (("device", False), (elsewhere, True))
        if outer[offloaded]
    }
    return dataclasses.replace(states, **changed)


def _update_seconds(units: Sequence[UnitBytes], states: StateBytes, machine: Machine) -> tuple[float, float]:
    """Return the seconds of the update, and of the transfers that it does not hide."""
    rates = machine.rates
    trained = [unit for unit in units if unit.gradients is not None]
    numel = sum(unit.optimizer_numel for unit in trained)
    by_place = (states.device, states.cpu, states.nvme)
    moments = sum(place.get("optimizer", 0) for place in by_place)
    masters = sum(unit.optimizer_numel * unit.master_dtype.itemsize for unit in trained)
    gradients = sum(unit.optimizer_numel * unit.gradients.dtype.itemsize for unit in trained if unit.gradients)
    low_precision = sum(
        unit.optimizer_numel * unit.plan.dtype.itemsize for unit in trained if unit.plan.is_mixed_precision
    )
    # The norm reads the gradients once more. Where the parameters are whole, users may have written into them, and
    # their copy in low precision is read too.
    nbytes = 2 * (masters + moments) + 2 * gradients + low_precision
    nbytes += sum(
        unit.optimizer_numel * unit.plan.dtype.itemsize
        for unit in trained
        if unit.plan.is_mixed_precision and unit.degrees.parameters == 1
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
