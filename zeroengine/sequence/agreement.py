"""What ranks that share a sample must have alike: the sample and the loss.

Nothing fails where they differ. Each rank would train on tokens of another sample, or weigh tokens by the number of
labels of its own part.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from zeroengine.comm.replicas import RankSums
from zeroengine.errors import DivergenceError
from zeroengine.runtime.input_digest import digest_inputs
from zeroengine.utils.small_transfers import HostCopy

# Batches of whole sequences, before they are cut. States of generators that a forward draws numbers for whole samples
# from. Numbers of labels of this rank's parts. Losses that backwards begin with. Calls of ``mean_loss``.
Fact = Literal["batches", "random states", "labels", "losses", "means"]
FACTS: tuple[Fact, ...] = get_args(Fact)
WRITE_MEAN = (
    "Write zeroengine.mean_loss(total, count), with the sum of the losses of this rank's tokens and their number, in "
    "place of the mean"
)


class SharedFacts:
    """Collects what the ranks of a group have done in a step, and compares it when the step ends.

    One small collective of all ranks exchanges the facts of each. On a GPU the host reads the result when the next step
    ends, when it has arrived, and on the CPU at once.

    Args:
        device: The device that the model computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._summed: HostCopy | None = None
        self._reset()

    def _reset(self) -> None:
        self._sums = {fact: torch.zeros((), dtype=torch.float64, device=self._device) for fact in FACTS}
        self._counts = dict.fromkeys(FACTS, 0)

    def note(self, fact: Fact, value: torch.Tensor | None = None) -> None:
        """Note one more fact of a kind, with its value, a tensor of one number. None: it has none that can be read."""
        self._counts[fact] += 1
        if value is not None:
            # Each of several micro-steps has a factor of its own, so that differences do not cancel.
            number = value.detach().to(self._device, torch.float64).view(())
            self._sums[fact] = self._sums[fact] + number * self._counts[fact]

    def note_digest(self, fact: Fact, inputs: Any) -> None:
        """Note the digest of tensors in nested containers."""
        self.note(fact, digest_inputs(inputs, self._device))

    def end_step(self, transport: RankSums, group_size: int) -> None:
        """Compare the facts of the step. A collective of all ranks.

        Args:
            transport: Sums over all ranks.
            group_size: The number of consecutive ranks that share a sample.

        Raises:
            DivergenceError: On every rank: ranks that share a sample were given different ones, or have different
                losses, or means over different numbers of labels.
        """
        self._check(group_size)
        rows = torch.zeros(transport.world_size, 2 * len(FACTS), dtype=torch.float64, device=self._device)
        counts = torch.tensor(list(self._counts.values()), dtype=torch.float64, device=self._device)
        rows[transport.rank] = torch.cat([torch.stack(list(self._sums.values())), counts])
        self._reset()
        self._summed = HostCopy(transport.all_reduce_scalars(rows.flatten(), "compare what ranks share"))
        if self._device.type == "cpu":
            self._check(group_size)

    def _check(self, group_size: int) -> None:
        summed, self._summed = self._summed, None
        values = [] if summed is None else summed.read()
        rows = [values[start : start + 2 * len(FACTS)] for start in range(0, len(values), 2 * len(FACTS))]
        for first in range(0, len(rows), group_size):
            error = _difference(rows[first : first + group_size])
            if error is not None:
                last = first + group_size - 1
                raise DivergenceError(f"ranks {first} to {last} share each sample (sequence_parallel_size): {error}.")


def _difference(rows: list[list[float]]) -> str | None:
    """Return in what the ranks of a group differ, and what to write instead."""
    batches, random_states, labels, losses, _, *_, num_labels, _, num_means = zip(*rows, strict=True)
    if len(set(batches)) > 1:
        return (
            "they were given different samples. Give the ranks of a group the same: engine.dataloader(dataset), or "
            "DistributedSampler(dataset, engine.num_sample_groups, engine.sample_group)"
        )
    if len(set(random_states)) > 1:
        return (
            "the model draws random numbers for whole samples, as a layer that is dropped at random does, and these "
            "ranks draw different ones. Seed the ranks of a group alike: torch.manual_seed(seed + engine.sample_group)"
        )
    if len({repr(loss) for loss in losses}) == 1:
        return None
    is_mean = any(num_means)
    if any(num_labels) and len(set(labels)) > 1 and not is_mean:
        return f"their parts have different numbers of labels, and the loss is a mean over each part. {WRITE_MEAN}"
    if is_mean or not any(num_labels):
        values = ", ".join(f"{loss:.6g}" for loss in losses)
        return f"they began backwards with different losses, {values}. {WRITE_MEAN}"
    return None
