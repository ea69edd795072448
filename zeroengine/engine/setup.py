"""What an engine is made from, and the calls that end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import nn

from zeroengine.comm.model_group import ExpertGroup
from zeroengine.config import Config
from zeroengine.memory.state_memory import StateMemory
from zeroengine.offload.device_copies import GPUCopies
from zeroengine.optim.lr_schedules import LRSchedulerLike
from zeroengine.partition.cut import UnitPlan


class PartitionUndo:
    """The calls that end one partitioning of the model, with the engine or where ``Engine.change`` makes another one.

    Attributes:
        hooks: Make the model ordinary again.
        stores: Close the stores of its states, which the calls of ``hooks`` may still read.
    """

    def __init__(self) -> None:
        self.hooks, self.stores = ExitStack(), ExitStack()

    def begin_again(self) -> PartitionUndo:
        """Return the calls so far, and take those of another partitioning from now on."""
        earlier = PartitionUndo()
        earlier.take_over(self)
        self.hooks, self.stores = ExitStack(), ExitStack()
        return earlier

    def take_over(self, other: PartitionUndo) -> None:
        """Make the calls of ``other`` in place of those so far."""
        self.hooks, self.stores = other.hooks, other.stores

    def end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Make all calls, those of the stores last. See ``Restoration`` for ``error``."""
        try:
            self.hooks.__exit__(kind, error, traceback)
        finally:
            self.stores.close()


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is made from, after the checks of ``initialize``: the same on every rank.

    Attributes:
        model: The model; its parameters keep their objects, shapes and names.
        base_optimizer: An optimizer over the model's own parameters, whose rule and param groups are adopted.
        lr_scheduler: A schedule over ``base_optimizer``, a callable that makes one, or None.
        state_memory: The units, the resolved configuration, and what states take with it and with other choices.
        async_step: Whether a step is issued without waiting for its norm. None: on a GPU, where possible.
        copies: Moves tensors between the device and the host. None: as the device requires.
        undo: The calls that end the engine: they make the model, the optimizer and the schedule ordinary again, with
            their values at that time, and free the engine's threads, files and other resources.
        partition_undo: Of these, the calls that end how the model is partitioned. It is one of the calls of ``undo``.
        requested: The configuration before it was resolved.
        resolve: Resolves a configuration for this model and these ranks: ``Config.resolve``.
        model_groups: The ranks that hold one model together, in the order of their slices, for each model; empty: no
            parameter is split.
        experts: The ranks that the experts are split over; None: they are not split.
    """

    model: nn.Module
    base_optimizer: torch.optim.Optimizer
    lr_scheduler: LRSchedulerLike
    state_memory: StateMemory
    async_step: bool | None
    copies: GPUCopies | None
    undo: ExitStack
    partition_undo: PartitionUndo
    requested: Config
    resolve: Callable[[Config], Config]
    model_groups: Sequence[tuple[int, ...]] = ()
    experts: ExpertGroup | None = None

    @property
    def is_split(self) -> bool:
        """Whether parameters of the model are split over ranks."""
        return bool(self.model_groups) or self.experts is not None

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.state_memory.config

    @property
    def plans(self) -> Sequence[UnitPlan]:
        """The units that the model is cut into."""
        return self.state_memory.plans
