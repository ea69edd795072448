"""A data loader whose position is part of a checkpoint, and holds for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from zeroengine.errors import ZeroEngineError


class Share(Sampler[int]):
    """One rank's share of each epoch's order: every ``world_size``-th sample from where the epoch goes on.

    The order depends on the seed and the epoch alone, so a position in it means the same on any number of ranks.
    """

    def __init__(self, numel: int, rank: int, world_size: int, shuffle: bool, seed: int) -> None:
        self._numel, self._rank, self._world_size = numel, rank, world_size
        self._shuffle, self._seed = shuffle, seed
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return max(0, self._numel - self.start) // self._world_size

    def __iter__(self) -> Iterator[int]:
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._numel, generator=generator, device="cpu").tolist()
        else:
            order = list(range(self._numel))
        first = self.start + self._rank
        return iter(order[first : self.start + len(self) * self._world_size : self._world_size])


class ResumableLoader:
    """Batches of this rank's share of a data set, epoch by epoch; made by ``Engine.dataloader``.

    Each ``for batch in loader`` is one epoch. After a checkpoint is loaded, the next one goes on where it was saved;
    ``epoch`` says which one that is:

        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                ...

    Attributes:
        epoch: of the next, or the present, pass.
    """

    world_independent = True

    def __init__(
        self,
        dataset: Dataset[Any],
        rank: int,
        world_size: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        options: Mapping[str, Any],
    ) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise ZeroEngineError(
                f"dataloader() takes a data set with a length and an index; {type(dataset).__name__} has none. For a "
                "stream use torchdata's StatefulDataLoader and engine.register_stateful(name, loader)."
            )
        if len(dataset) < world_size * batch_size:
            raise ZeroEngineError(
                f"dataloader(): {len(dataset)} samples are too few for one micro-batch of {batch_size} on each of "
                f"{world_size} ranks"
            )
        taken = {"batch_size", "sampler", "batch_sampler", "drop_last"} & options.keys()
        if taken:
            raise ZeroEngineError(
                f"dataloader() chooses {', '.join(sorted(taken))} itself; the batch size is the configuration's "
                "train_micro_batch_size_per_gpu"
            )
        self._share = Share(len(dataset), rank, world_size, shuffle, seed)
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=batch_size, sampler=self._share, drop_last=True, **options
        )
        self._step = batch_size * world_size
        self._resumes = False
        self._consumed = 0  # samples of this epoch over all ranks, in batches that were handed out

    @property
    def epoch(self) -> int:
        return self._share.epoch

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._share._numel // self._share._world_size // (self._step // self._share._world_size)

    def __iter__(self) -> Iterator[Any]:
        if not self._resumes:
            self._consumed = 0
        self._resumes = False
        self._share.start = self._consumed
        for batch in self._loader:
            self._consumed += self._step
            yield batch
        self._share.epoch += 1
        self._consumed = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._share.epoch, "consumed": self._consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._share.epoch, self._consumed = state["epoch"], state["consumed"]
        self._resumes = True
