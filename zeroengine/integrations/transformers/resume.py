"""Where a resumed run continues in its data, on any number of ranks.

[Note: Positions in samples]
The trainer counts updates, and computes the epoch and the batches to skip from their number. That holds only as long
as an update takes equally many samples. So a checkpoint has the number of samples of its epoch that were trained. The
ranks take turns in the order of the sampler, which the seed and the epoch decide, so these samples are its beginning.
The trainer skips them in whole updates, and a resumed epoch leaves out the few that make no whole update.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

log = logging.getLogger("zeroengine")

# The key of the position in the trainer's state, among the states of callbacks.
POSITION = "ZeroTrainer"


class EpochStart(NamedTuple):
    """Says where a resumed run begins in its first epoch.

    Attributes:
        epoch: The number of the epoch.
        num_samples: The number of its samples that are not trained again.
        num_skipped: The number of batches of a rank that the trainer skips, those of whole updates.
        num_batches: The number of batches of a rank in the epoch, with those.
    """

    epoch: int
    num_samples: int
    num_skipped: int
    num_batches: int


class _RestOfEpoch(Sampler[int]):
    """Yields what `sampler` yields, in the first epoch without the first `num_left_out` samples."""

    def __init__(self, sampler: Any, num_left_out: int) -> None:
        self._sampler, self._num_left_out = sampler, num_left_out

    def __iter__(self) -> Iterator[int]:
        num_left_out, self._num_left_out = self._num_left_out, 0
        return itertools.islice(self._sampler, num_left_out, None)

    def __len__(self) -> int:
        return len(self._sampler) - self._num_left_out

    def set_epoch(self, epoch: int) -> None:
        """Let the sampler take the order of an epoch."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)


def resume_data(
    state: TrainerState, args: TrainingArguments, loader: Any, samples_per_batch: int, values: tuple[Any, ...]
) -> tuple[EpochStart, tuple[Any, ...]]:
    """Let a loader continue where a checkpoint was saved. See "Positions in samples" above.

    Args:
        state: The trainer's state in the checkpoint.
        args: The arguments of this run.
        loader: The prepared loader of this run.
        samples_per_batch: The number of samples of a batch on all ranks together.
        values: What `Trainer.set_initial_training_values` returns for a run from the beginning.

    Returns:
        Where the run begins, and the values of a run from there.
    """
    epochs, updates, num_examples, *others, batches, max_steps = values
    accumulation = args.gradient_accumulation_steps
    samples_per_update = samples_per_batch * accumulation
    # A trainer without the engine, and earlier versions, have saved the part of the epoch alone. 0: an epoch has ended.
    epoch, trained = int(state.epoch), round(state.epoch % 1 * num_examples)
    if (saved := state.stateful_callbacks.get(POSITION)) and (state.epoch % 1 or not has_length(loader)):
        epoch, trained = saved["epoch"], saved["samples"]
    num_skipped, num_left_out = divmod(trained, samples_per_update)
    num_skipped, num_batches = num_skipped * accumulation, batches
    sampler = _one_pass_sampler(loader) if num_left_out else None
    if sampler is None:
        num_left_out = 0
    else:
        remaining_batches = (len(sampler) - num_left_out) / samples_per_batch
        num_batches = math.floor(remaining_batches) if args.dataloader_drop_last else math.ceil(remaining_batches)
    if has_length(loader):
        if num_batches <= num_skipped:
            epoch, trained, num_skipped, num_left_out, num_batches = epoch + 1, 0, 0, 0, batches
        # The number of updates of this size that the run would have taken up to here.
        position = (epoch + 1) * updates - math.ceil((num_batches - num_skipped) / accumulation)
        remaining = max(0, max_steps - (state.global_step if args.max_steps > 0 else position))
        epochs = math.ceil((position + remaining) / updates) if remaining else epoch
    else:
        position, remaining = state.global_step, max_steps - state.global_step
        num_batches = num_skipped + remaining * accumulation
    if args.ignore_data_skip:
        num_skipped, num_left_out, num_batches = 0, 0, batches
    if num_left_out:
        loader.set_sampler(_RestOfEpoch(sampler, num_left_out))
    start = EpochStart(epoch, num_skipped * samples_per_batch + num_left_out, num_skipped, num_batches)
    max_steps = state.global_step + remaining
    changed = position != state.global_step or (start.num_samples != trained and not args.ignore_data_skip)
    if changed and args.should_log:
        log.warning(
            f"resume_from_checkpoint: after {state.global_step} updates, {trained} samples of epoch {epoch} were "
            f"trained. An update takes {samples_per_update} samples here. Training continues after "
            f"{start.num_samples} samples of this epoch, trains {trained - start.num_samples} again, and takes "
            f"{remaining} more updates, to step {max_steps}, from which learning rates are computed."
        )
    return start, (epochs, updates, num_examples, *others, batches, max_steps)


def _one_pass_sampler(loader: Any) -> Any:
    """Return the sampler of a loader where it may begin anywhere: others may put the samples of a batch together."""
    batch_sampler = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    sampler = getattr(batch_sampler, "sampler", None)
    begins_anywhere = type(batch_sampler) is BatchSampler and isinstance(sampler, (RandomSampler, SequentialSampler))
    return sampler if begins_anywhere and hasattr(loader, "set_sampler") else None
