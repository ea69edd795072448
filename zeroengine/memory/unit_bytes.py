"""One unit on one rank: its layout, its degrees and its places, before it exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroengine.comm.transports.single_process import SingleProcessTransport
from zeroengine.config import Config
from zeroengine.offload.placement_plan import PlacementPlan
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.layout import FlatLayout
from zeroengine.partition.slices import local_numel
from zeroengine.partition.unit_layout import DegreeRules, layout_of_unit
from zeroengine.runtime.unit_gradients import GradientFormat


@dataclass(frozen=True)
class UnitBytes:
    """What a rank will hold of one unit.

    Attributes:
        plan: The unit.
        degrees: Its degrees.
        layout: Where its parameters lie.
        shard_offloaded: Whether its parameter shard is in a store.
        states_offloaded: Whether its master weights and its optimizer state are in a store.
        gradients: How its gradients are kept and sent; None: the unit is frozen.
    """

    plan: UnitPlan
    degrees: Degrees
    layout: FlatLayout
    shard_offloaded: bool
    states_offloaded: bool
    gradients: GradientFormat | None

    @property
    def is_releasable(self) -> bool:
        """Whether the full buffer is released between uses."""
        return self.degrees.parameters > 1 or self.shard_offloaded

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffer."""
        return self.layout.numel * self.plan.dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of the parameter shard, which is the full buffer at parameter degree 1."""
        return self.layout.shard_numel(self.degrees.parameters) * self.plan.dtype.itemsize

    @property
    def secondary_bytes(self) -> int:
        """Bytes of the shard of the second copy of the parameters; 0 if there is none."""
        return self.full_bytes // self.degrees.secondary if self.degrees.secondary and not self.shard_offloaded else 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the summed gradients that the rank keeps; 0 for a frozen unit."""
        if self.gradients is None:
            return 0
        return self.layout.shard_numel(self.degrees.gradients) * self.gradients.dtype.itemsize

    @property
    def sum_degree(self) -> int:
        """The degree of the shards that the sum of the gradients goes to. At 1 every rank gets all of it."""
        # Gradients that are whole on each rank are summed for the shards of the optimizer.
        return self.degrees.gradients if self.degrees.gradients > 1 else self.degrees.optimizer

    def num_sum_slices(self, world_size: int) -> int:
        """Return the number of slices that a sum cuts the gradients into. An all-reduce has one for each rank."""
        return self.sum_degree if self.sum_degree > 1 else world_size

    @property
    def optimizer_numel(self) -> int:
        """Elements that the rank updates, padding included; 0 for a frozen unit."""
        return 0 if self.gradients is None else self.layout.shard_numel(self.degrees.optimizer)

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype that is updated."""
        return torch.float32 if self.plan.has_master else self.plan.dtype

    @property
    def has_wide_values(self) -> bool:
        """Whether the model's values are rounded, so that a master is kept from before that."""
        plan = self.plan
        return plan.has_master and any(p.dtype is not plan.dtype for _, p in plan.params)


def average_bytes(config: Config) -> int:
    """Return the bytes of an element of the moving average of the weights; 0 if there is none."""
    return 0 if config.ema is None else config.ema.torch_dtype.itemsize


def value_bytes(plan: UnitPlan, device: str) -> int:
    """Return the bytes of the values that the caller's parameters have in the memory of a kind of device."""
    return sum(local_numel(p) * p.element_size() for _, p in plan.params if p.device.type == device)


def units_of_plans(
    plans: Sequence[UnitPlan],
    rules: DegreeRules,
    config: Config,
    world_size: int,
    shard_align_bytes: int,
    placement: PlacementPlan,
) -> list[UnitBytes]:
    """Return what rank 0 will hold of each unit.

    Args:
        plans: The units.
        rules: The degrees of each unit.
        config: The resolved configuration.
        world_size: The number of ranks.
        shard_align_bytes: ``Transport.shard_align_bytes``.
        placement: Which states are offloaded.
    """
    units = []
    states_offloaded = iter(placement.optimizer_offloaded)
    for plan, shard_offloaded in zip(plans, placement.params_offloaded, strict=True):
        unit_degrees = rules.of_unit(plan)
        # Experts that one rank alone has are sent to no other one.
        align = SingleProcessTransport.shard_align_bytes if plan.expert_ranks == 1 else shard_align_bytes
        layout = layout_of_unit(plan, unit_degrees, world_size, align)
        gradients, has_store = None, False
        if plan.trainable:
            has_store = next(states_offloaded)
            gradients = GradientFormat.of_unit(
                plan.dtype,
                unit_degrees,
                plan.data_ranks(world_size),
                config.accumulation_dtype(plan.dtype),
                config.reduce_dtype(plan.dtype),
                has_store=has_store,
            )
        units.append(UnitBytes(plan, unit_degrees, layout, shard_offloaded, has_store, gradients))
    return units
