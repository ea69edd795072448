"""Groups of ranks that share samples (``Config.ranks_per_sample``): their loaders, metrics and schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import patch_environment

from zeroengine.engine.engine import Engine
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.accelerate.settings import PARALLELISM_VARIABLE
from zeroengine.integrations.accelerate.wrappers import ZeroAcceleratedOptimizer
from zeroengine.sequence.batches import shard_sequence
from zeroengine.utils.tensors import map_tensors, tensors_in


class _View(SimpleNamespace):
    """The object `viewed`, with other attributes for a method that reads them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.viewed, name)


class SampleGroupAccelerator(Accelerator):
    """An `Accelerator` whose ranks form groups. All ranks of a group get the same batches, or each its parts of them.

    Args:
        degree: The number of consecutive ranks of a group.
        cuts: Whether each rank gets a part of each sequence.
        arguments: The arguments of `Accelerator`.

    Attributes:
        num_groups: The number of groups.
    """

    def __init__(self, degree: int, cuts: bool, **arguments: Any) -> None:
        # accelerate would make groups of its own.
        with patch_environment(**{PARALLELISM_VARIABLE: "false"}):
            super().__init__(**arguments)
        self._degree, self._cuts, self.num_groups = degree, cuts, max(1, self.num_processes // degree)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader as accelerate does, for as many ranks as there are groups."""
        group, dispatches = self.process_index // self._degree, self.dispatch_batches if self._degree == 1 else False
        # A rank that dispatches batches would do so to every rank.
        view: Any = _View(viewed=self, num_processes=self.num_groups, process_index=group, dispatch_batches=dispatches)
        return self.cut_batches(Accelerator.prepare_data_loader(view, data_loader, *args, **kwargs))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader without its first batches."""
        return self.cut_batches(super().skip_first_batches(dataloader, num_batches))

    def cut_batches(self, loader: Any) -> Any:
        """Let a loader yield the part of this rank of each batch, and return it."""
        if self._cuts:
            base = loader.base_dataloader
            # accelerate's loader calls this by its name, and `iter` finds that of the class.
            base.__iter__ = lambda: map(self._part_of, iter(base))
        return loader

    def _training_engines(self) -> list[Engine]:
        return [optimizer.engine for optimizer in self._optimizers if isinstance(optimizer, ZeroAcceleratedOptimizer)]

    def _part_of(self, batch: Any) -> Any:
        engines = self._training_engines()
        return shard_sequence(batch, engine=engines[0] if len(engines) == 1 else None)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what ranks have computed for each sample. Parts of [batch, tokens, ...] are joined.

        Of tensors of one dimension or none, such as losses, and of whole sequences, those of one rank of each group
        count.
        """
        if self._degree > 1 and (use_gather_object or not list(tensors_in(input_data))):
            raise ZeroEngineError("gather_for_metrics() of objects, where ranks share samples: pass tensors")
        view: Any = _View(viewed=self, gather=lambda data: map_tensors(self._join_parts, self.gather(data)))
        return Accelerator.gather_for_metrics(view if self._degree > 1 else self, input_data, use_gather_object)

    def _join_parts(self, gathered: torch.Tensor) -> torch.Tensor:
        grouped: torch.Tensor = gathered.unflatten(0, (self.num_groups, self._degree, -1))
        if self._cuts and gathered.dim() > 1:
            return grouped.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        return grouped[:, 0].flatten(0, 1)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a schedule as accelerate does, which an update steps once for each group, and not for each rank."""
        prepared = super().prepare_scheduler(scheduler)
        if self._degree > 1 and self.step_scheduler_with_optimizer and not self.split_batches:
            view = _View(viewed=scheduler, step=lambda *args: [scheduler.step(*args) for _ in range(self.num_groups)])
            prepared.split_batches, prepared.scheduler = True, view
        return prepared
