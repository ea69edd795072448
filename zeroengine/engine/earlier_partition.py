"""The partitioning of a model before a change, which gives its states to the next one, a unit at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from zeroengine.comm.interfaces import Transport
from zeroengine.engine.restoration import raise_abandoned
from zeroengine.offload.interfaces import OffloadStore
from zeroengine.optim.lr_schedules import LRSchedule
from zeroengine.optim.outlier_steps import OutlierSteps
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.optim.state_moves import StateMoves
from zeroengine.partition.cut import UnitPlan
from zeroengine.runtime.released_parameter import stop_observing
from zeroengine.runtime.unit import Unit


@dataclass
class EarlierPartition:
    """The units before a change, and what goes on after it. All ranks call its methods together.

    Nothing else refers to the memory of these states, so that each unit's is freed when it has moved.

    Attributes:
        units: The units, of which nothing computes any more.
        moves: Moves the optimizer's states.
        transport: Moves bytes between the ranks.
        optimizer: The engine's optimizer, which gets other shards.
        lr_schedule: The LR schedule.
        outliers: The steps that ``skip_steps`` judges by.
        elementwise_members: As of ``States``.
        notices: The notices of the configuration that were given already.
        has_disks: Whether states were on a disk.
    """

    units: Sequence[Unit]
    moves: StateMoves
    transport: Transport
    optimizer: ShardedOptimizer
    lr_schedule: LRSchedule
    outliers: OutlierSteps | None
    elementwise_members: set[str]
    notices: frozenset[str]
    has_disks: bool

    def __post_init__(self) -> None:
        # By parameter that has not moved, its unit and its index there; and the units that are gathered, with their
        # number of these.
        self._places = {param: (unit, index) for unit in self.units for index, param in enumerate(unit.params)}
        self._gathered: dict[Unit, int] = {}
        self._device = self.units[0].full_buffer.tensor.device

    def gather_parameters(self, plan: UnitPlan) -> None:
        """Let the parameters of a unit after the change show their values, so that it can copy them. A collective."""
        # Parameters that were made in inference mode could never be trained.
        with torch.inference_mode(False), torch.no_grad():
            for unit in dict.fromkeys(self._places[param][0] for _, param in plan.params):
                if unit not in self._gathered:
                    self._gathered[unit] = len(unit.params)
                    for param in unit.params:
                        stop_observing(param)
                    unit.gather_whole()
                    unit.full_buffer.show()

    def abandon(self, reason: str) -> None:
        """Leave the parameters that have not moved yet without values: each use of one raises, with ``reason``."""
        for unit in dict.fromkeys(unit for unit, _ in self._places.values()):
            unit.abandon_parameters(partial(raise_abandoned, reason))

    def move_states(self, unit: Unit, store: OffloadStore | None) -> None:
        """Move the optimizer's states of a unit after the change, and free what nothing needs any more. A collective.

        Args:
            unit: The unit. It has its parameters.
            store: Where its masters and moments are to be; None: on the device.
        """
        for index, param in enumerate(unit.params):
            earlier, earlier_index = self._places.pop(param)
            unit.originals.continue_from(index, earlier.originals, earlier_index)
            self._gathered[earlier] -= 1
            if not self._gathered[earlier]:
                del self._gathered[earlier]
                earlier.drop_memory()
        if unit.trainable:
            self.moves.move(unit, store)
        self._reclaim()

    def finish_moves(self) -> None:
        """Give the optimizer, which has its new backend, the states without a value per element. A collective."""
        self.moves.finish(self.optimizer)
        self.units = ()
        self._reclaim()

    def _reclaim(self) -> None:
        # A peer may see this rank's earlier shards as its own memory. When it comes to the sum, it has copied them.
        self.transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64, device=self._device), "change")
        self.transport.reclaim()
