"""Compares what ranks were given and computed: samples of their own, or shared ones with one loss.

Nothing fails where it is wrong. Ranks with the same samples, as an ordinary ``DataLoader`` in each gives them, compute
the same gradient, and the work of all but one is wasted. Ranks that share a sample would train on tokens of different
ones, or weigh tokens by the number of labels of their own part.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from zeroengine.comm.replicas import RankSums
from zeroengine.errors import DivergenceError
from zeroengine.monitor.observer import Observer
from zeroengine.runtime.input_digest import can_read_values, digest_inputs
from zeroengine.utils.compiler_disable import hidden_from_activation_checkpoint
from zeroengine.utils.formats import listed
from zeroengine.utils.tensors import HostCopy, to_device

log = logging.getLogger("zeroengine")

# The number of micro-steps, at the start of a run, whose inputs are compared.
MICRO_STEPS = 3
MAX_RANKS_SHOWN = 8
# Losses of a model group may differ by rounding, relative to the largest.
LOSS_TOLERANCE = 1e-5
# Batches of whole sequences, before they are cut. States of generators that a forward draws numbers for whole samples
# from. Numbers of labels of this rank's parts. Losses that backwards begin with. Calls of ``mean_loss``. Weights of
# losses.
Fact = Literal["batches", "random states", "labels", "losses", "means", "weights"]
FACTS: tuple[Fact, ...] = get_args(Fact)
WRITE_MEAN = (
    "Write zeroengine.mean_loss(total, count), with the sum of the losses of this rank's tokens and their number, in "
    "place of the mean"
)
SEED_ALIKE = (
    "the model draws random numbers for whole samples, as a layer that is dropped at random does, and these ranks draw "
    "different ones. Seed the ranks of a group alike: torch.manual_seed(seed + engine.sample_group)"
)


class RankComparison(Observer):
    """Compares the first inputs of training over the ranks, once, and in each step what ranks share.

    It warns if ranks have the same inputs, and raises an error if ranks that share samples differ.

    [Note: No rank waits]
    Digests of inputs in a device's memory are computed there. One small collective exchanges the facts of all ranks, in
    an update in which all ranks meet: with ``group_size`` of 1 in the first one after ``MICRO_STEPS`` micro-steps, and
    otherwise in each. Only the number of its steps decides whether a rank takes part, not the inputs of its forwards,
    so all ranks take part. On a GPU the host reads the result one step later, when it has arrived, and on the CPU at
    once.

    Args:
        transport: Sums over all ranks.
        device: The device that the model computes on.
        group_size: The number of consecutive ranks that share each sample.
        model_groups: The ranks that hold one model together, and compute whole samples together.

    Attributes:
        device: As given.
        group_size: As given.
    """

    def __init__(
        self,
        transport: RankSums,
        device: torch.device,
        group_size: int = 1,
        model_groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self._transport, self.device, self.group_size = transport, device, group_size
        self._model_groups = model_groups
        # Whether inputs of forwards are still to be observed.
        self._is_recording = transport.has_peers
        # The digest of each micro-step that has ended, and that of the micro-step in progress.
        self._digests: list[torch.Tensor | None] = []
        self._digest: torch.Tensor | None = None
        # The facts of all ranks, from the exchange until the host reads them.
        self._summed: HostCopy | None = None
        self._reset()

    def _reset(self) -> None:
        self._sums = {fact: torch.zeros((), dtype=torch.float64, device=self.device) for fact in FACTS}
        self._counts = dict.fromkeys(FACTS, 0)

    def note(self, fact: Fact, value: torch.Tensor | None = None) -> None:
        """Note one more fact of a kind, with its value, a tensor of one number. None: it has none that can be read."""
        self._counts[fact] += 1
        if value is not None:
            # Each of several micro-steps has a factor of its own, so that differences do not cancel.
            # An ordinary copy of a tensor of the host would wait for the device.
            here = value if value.device == self.device else to_device([float(value)], self.device)[0]
            self._sums[fact] = self._sums[fact] + here.detach().double().sum() * self._counts[fact]

    def forward_began(self, args: Any, kwargs: Any) -> None:
        """Note the inputs. The first forward of a micro-step counts."""
        if len(self._digests) < MICRO_STEPS and self._digest is None and can_read_values(self.device):
            with hidden_from_activation_checkpoint():
                self._digest = digest_inputs((args, kwargs), self.device)

    def loss_noted(self, loss: torch.Tensor, weight: float | torch.Tensor | None) -> None:
        """Note the loss, if several ranks compute it together; those of a model group, with the first inputs."""
        is_compared = self._model_groups and self._is_recording and not hasattr(loss, "placements")
        if self.group_size > 1 or is_compared:
            self.note("losses", loss)
            if weight is not None:
                self.note("weights", torch.as_tensor(weight))

    def micro_step_ended(self, ranks_meet: bool) -> None:
        """Note the end of a micro-step, and perhaps compare.

        Raises:
            DivergenceError: On every rank: ranks that share a sample were given different ones, or the same part, or
                have different losses, or means over different numbers of labels.
        """
        # The exchange was a micro-step ago, so the result has arrived, and reading it does not stall the device.
        self._check()
        if self._is_recording:
            self._digests.append(self._digest)
            self._digest = None
        # Inputs are exchanged once. Every rank has counted the same micro-steps, so every rank takes part.
        ends_recording = self._is_recording and len(self._digests) >= MICRO_STEPS
        if not ranks_meet or not (ends_recording or self.group_size > 1):
            return
        # Each rank fills its own row, so the sum over ranks holds the rows of all.
        shape = self._transport.world_size, MICRO_STEPS + 2 * len(FACTS)
        rows = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self._is_recording &= not ends_recording
        digests = self._digests[:MICRO_STEPS] if ends_recording else [None] * MICRO_STEPS
        # A digest of inputs is never 0, which stands for inputs that cannot be compared.
        values = [rows.new_zeros(()) if value is None else value for value in digests]
        # Assigning a number to an element would make the host wait for the device.
        counts = to_device(list(self._counts.values()), self.device)
        rows[self._transport.rank] = torch.cat([torch.stack([*values, *self._sums.values()]), counts])
        self._reset()
        sums = self._transport.all_reduce_scalars(rows.flatten(), "compare inputs")
        self._summed = HostCopy(sums.view_as(rows))
        if self.device.type == "cpu":
            self._check()

    def _check(self) -> None:
        """Read the sums, if there are any; raise an error, or warn."""
        summed, self._summed = self._summed, None
        rows = [] if summed is None else summed.read()
        for first in range(0, len(rows), self.group_size):
            last = first + self.group_size - 1
            error = _difference([row[MICRO_STEPS:] for row in rows[first : last + 1]])
            if error is not None:
                raise DivergenceError(f"ranks {first} to {last} share each sample (sequence_parallel_size): {error}.")
        inputs = [tuple(row[:MICRO_STEPS]) for row in rows]
        for members in self._model_groups if inputs else ():
            if len({inputs[rank] for rank in members}) > 1:
                raise DivergenceError(
                    f"ranks {listed(members, MAX_RANKS_SHOWN)} hold one model together, each with slices of its "
                    "parameters, and were given different inputs. Give them the same: engine.dataloader(dataset), or "
                    "DistributedSampler(dataset, engine.num_sample_groups, engine.sample_group)."
                )
            losses = [rows[rank][MICRO_STEPS + FACTS.index("losses")] for rank in members]
            if max(losses) - min(losses) > LOSS_TOLERANCE * max(map(abs, losses)):
                raise DivergenceError(
                    f"ranks {listed(members, MAX_RANKS_SHOWN)} hold one model together, and began backwards with "
                    f"different losses of the same inputs, {', '.join(f'{loss:.6g}' for loss in losses)} in all. "
                    "Where a layer returns the part of this rank to what is no rowwise layer, such as the loss, write "
                    '"colwise_gathered" for it. If the ranks drew different random numbers, as of dropout, seed them '
                    "alike: torch.manual_seed(seed + engine.sample_group)."
                )
        # Of those that compute together one stands for all.
        others = {rank for members in self._model_groups for rank in members[1:]}
        groups = ranks_with_same_inputs([() if rank in others else row for rank, row in enumerate(inputs)])
        for ranks in groups:
            if len({rank // self.group_size for rank in ranks}) < len(ranks):
                raise DivergenceError(
                    f"ranks {listed(ranks, MAX_RANKS_SHOWN)} were given the same tokens, and ranks that share a sample "
                    f"(sequence_parallel_size is {self.group_size}) take a part of it each: pass each batch through "
                    "zeroengine.shard_sequence(batch), as engine.dataloader(dataset) does"
                )
        # Every rank has the same sums, and one warning is enough.
        if not groups or self._transport.rank != 0:
            return
        who = " and on ".join(f"ranks {listed(ranks, MAX_RANKS_SHOWN)}" for ranks in groups)
        log.warning(
            "the inputs are the same on %s in the first %d micro-steps: these ranks compute the same gradients, and "
            "all but one do so in vain. Let each rank read its own part of the data: engine.dataloader(dataset), or "
            "DataLoader(dataset, sampler=DistributedSampler(dataset, engine.world_size, engine.rank), ...).",
            "all ranks" if len(groups[0]) == self._transport.world_size else who,
            MICRO_STEPS,
        )


def ranks_with_same_inputs(digests: Sequence[Sequence[float]]) -> list[list[int]]:
    """Return the groups of two or more ranks that have the same inputs, the largest first.

    A rank whose inputs are the same in every micro-step is in no group: they are constants, or one batch on purpose.

    Args:
        digests: Those of the first micro-steps, of each rank in rank order; 0 for inputs that cannot be compared.
    """
    groups: dict[tuple[float, ...], list[int]] = {}
    for rank, row in enumerate(digests):
        if all(row) and len(set(row)) > 1:
            groups.setdefault(tuple(row), []).append(rank)
    return sorted((ranks for ranks in groups.values() if len(ranks) > 1), key=len, reverse=True)


def _difference(rows: list[list[float]]) -> str | None:
    """Return in what the ranks of a group differ, and what to write instead."""
    batches, random_states, labels, losses, _, weights, *_, num_labels, num_losses, num_means, _ = zip(
        *rows, strict=True
    )
    if len(set(batches)) > 1:
        return (
            "they were given different samples. Give the ranks of a group the same: engine.dataloader(dataset), or "
            "DistributedSampler(dataset, engine.num_sample_groups, engine.sample_group)"
        )
    if len(set(random_states)) > 1:
        return SEED_ALIKE
    if len(set(weights)) > 1:
        return (
            f"they gave their losses different weights, {', '.join(f'{weight:.6g}' for weight in weights)} over a "
            "common number. Give the weight of the loss that they have together, such as the number of labels of the "
            "whole sample"
        )
    # A plain `loss.backward()` shows no loss.
    if any(num_losses) and len({repr(loss) for loss in losses}) == 1:
        return None
    is_mean = any(num_means)
    if any(num_labels) and len(set(labels)) > 1 and not is_mean:
        return f"their parts have different numbers of labels, and the loss is a mean over each part. {WRITE_MEAN}"
    if any(num_losses) and (is_mean or not any(num_labels)):
        values = ", ".join(f"{loss:.6g}" for loss in losses)
        return f"they began backwards with different losses, {values}. {WRITE_MEAN}"
    return None
