"""The parts of an engine that checkpoints and weight files read and write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from zeroengine.checkpoint.entries import StateIndex
from zeroengine.comm.group import Group
from zeroengine.config import Config
from zeroengine.optim.loss_scaler import LossScaler
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.runtime.unit import Unit


@dataclass(frozen=True)
class CheckpointedParts:
    """The parts of an engine that have state, and what is needed to put their state back.

    Attributes:
        find_lr_scheduler: Returns the LR schedule of now, or None: the user may replace it at any time.
        counters: Returns the engine's step counters by name.
        republish: Makes every rank compute with the masters' values, after they were written.
        stateful: The user's registered objects, by name.
        on_disk: Whether any state is on disk.
        evict: Gives back the memory that reading states on disk took.
    """

    module: nn.Module
    units: Sequence[Unit]
    optimizer: ShardedOptimizer
    find_lr_scheduler: Callable[[], Any]
    scaler: LossScaler
    config: Config
    group: Group
    counters: Callable[[], dict[str, int]]
    republish: Callable[[], None]
    stateful: Mapping[str, Any]
    on_disk: bool = False
    evict: Callable[[], None] = lambda: None

    @property
    def lr_scheduler(self) -> Any:
        """The LR schedule that the engine steps, or None."""
        return self.find_lr_scheduler()

    @property
    def state_index(self) -> StateIndex:
        """The tensors of the model and the optimizer, by name."""
        return StateIndex(self.module, self.units, self.optimizer, self.group.rank, self.group.world_size)

    @property
    def parameter_names(self) -> dict[nn.Parameter, str]:
        """The name of each parameter."""
        return {p: slot.name for unit in self.units for p, slot in zip(unit.params, unit.layout.slots, strict=True)}
