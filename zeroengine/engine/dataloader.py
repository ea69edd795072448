"""A data loader whose position is part of a checkpoint and means the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from zeroengine.errors import ZeroEngineError
from zeroengine.utils.formats import counted


class ResumableLoader:
    """Yields batches of this rank's share of a data set. ``Engine.dataloader`` makes one.

    Each ``for batch in loader`` is one epoch. After a checkpoint is loaded, the next loop continues where it was saved,
    in the epoch of number ``epoch``:

        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                ...

    The order depends on the seed and the epoch alone, and the ranks take turns within it. So the consumed samples are
    its beginning, on any number of ranks.

    Args:
        dataset: A data set with a length and an index.
        rank: This rank.
        world_size: The number of ranks.
        batch_size: The number of samples of one micro-batch on one rank.
        shuffle: Whether each epoch has another order.
        seed: The seed of these orders.
        options: Further arguments of ``torch.utils.data.DataLoader``.
        drop_last: Whether an epoch leaves out what does not fill a batch on every rank.
        repeat_samples: Whether some samples are repeated so that all ranks have as many. None: where ``drop_last`` is
            false.

    Attributes:
        dataset: The data set.
        batch_size: The number of samples of one micro-batch on one rank.
        epoch: The number of the current epoch from 0, or between epochs of the next one.
        cut: Returns the part of a batch that this rank takes.

    Raises:
        ZeroEngineError: The data set has no length or too few samples, or an option is one that the loader chooses.
    """

    # The saved state means the same on any number of ranks.
    world_independent = True

    def __init__(
        self,
        dataset: Dataset[Any],
        rank: int,
        world_size: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        options: Mapping[str, Any],
        drop_last: bool = True,
        repeat_samples: bool | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise ZeroEngineError(
                f"dataloader() takes a data set with a length and an index; {type(dataset).__name__} has none. For a "
                "stream use torchdata's StatefulDataLoader and engine.register_stateful(name, loader)."
            )
        self.dataset, self.batch_size, self._drop_last = dataset, batch_size, drop_last
        self._repeats_samples = not drop_last if repeat_samples is None else repeat_samples
        self._rank, self._world_size, self._shuffle, self._seed = rank, world_size, shuffle, seed
        self._num_samples, self._samples_per_step = len(dataset), batch_size * world_size
        # A loader of too few samples would yield nothing, and training would end without an error.
        if not len(dataset) or not len(self):
            raise ZeroEngineError(
                f"dataloader(): {counted(len(dataset), 'sample')} cannot fill one micro-batch of {batch_size} on "
                f"{counted(world_size, 'rank')}"
            )
        # The position counts samples of this sampler in whole steps, so these options would break it.
        conflicts = {"sampler", "batch_sampler"} & options.keys()
        if conflicts:
            raise ZeroEngineError(
                f"dataloader() chooses {', '.join(sorted(conflicts))} itself: write shuffle, seed, batch_size and "
                "drop_last, or make a loader of your own"
            )
        self.epoch = 0
        self.cut: Callable[[Any], Any] = lambda batch: batch
        # This rank's samples in the epoch, which each epoch replaces.
        self._indices: list[int] = []
        # DataLoader draws a number for its workers whenever an iteration begins. From the global generator the number
        # would be missing in a run that is resumed within an epoch, whose dropout would then differ.
        self._worker_seeds = torch.Generator()
        self._worker_seed = (torch.initial_seed(), seed, rank)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self._indices,
            drop_last=drop_last,
            **{"generator": self._worker_seeds, **options},
        )
        # Whether the next epoch starts at the position that load_state_dict set.
        self._resumes = False
        # The number of samples of this epoch in the batches that all ranks have yielded, without prefetched batches.
        self._consumed = 0

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""
        own = (self._num_samples + self._repeats_samples * (self._world_size - 1)) // self._world_size
        return own // self.batch_size if self._drop_last else -(-own // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one epoch, or the remaining batches of the epoch whose position was loaded."""
        # Breaking out of an epoch and looping again starts the same epoch from its beginning.
        if not self._resumes:
            self._consumed = 0
        self._resumes = False
        self._indices[:] = self._remaining_samples()
        # The hash of integers is the same in every process. The workers of other ranks and epochs get other seeds.
        self._worker_seeds.manual_seed(hash((*self._worker_seed, self.epoch, self._consumed)) % 2**63)
        for batch in self._loader:
            # This comes before the yield, because a checkpoint saved while this batch is used must not repeat it.
            self._consumed += self._samples_per_step
            yield self.cut(batch)
        self.epoch += 1
        self._consumed = 0

    def _remaining_samples(self) -> list[int]:
        """Return this rank's samples in the rest of the epoch. The order of all samples is freed, as it may be long."""
        order: Sequence[int] = range(self._num_samples)
        if self._shuffle:
            # A separate generator leaves the global random state alone, and every rank computes the same order.
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._num_samples, generator=generator, device="cpu").tolist()
        # The remainder is dropped, or the first samples are repeated, so that every rank has the same number of
        # batches. A rank with one more would wait in a collective.
        surplus = max(self._num_samples - self._consumed, 0) % self._world_size
        stop = self._num_samples + -surplus % self._world_size if self._repeats_samples else self._num_samples - surplus
        places = range(self._consumed + self._rank, stop, self._world_size)
        own = order[places.start : stop : self._world_size]
        return [*own, *(order[place % self._num_samples] for place in places[len(own) :])]

    @property
    def data_sampler(self) -> ResumableLoader:
        """This object, of which loops call ``set_epoch``."""
        return self

    sampler = data_sampler

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be the epoch of this number, from its beginning; the present one goes on where it is."""
        if epoch != self.epoch:
            self.epoch, self._consumed, self._resumes = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch and the number of its samples that are consumed."""
        return {"epoch": self.epoch, "consumed": self._consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position that ``state_dict`` returned."""
        self.epoch, self._consumed = state["epoch"], state["consumed"]
        self._resumes = True
