"""Warns if ranks train on the same samples, as they do if each has an ordinary ``DataLoader``.

Nothing fails in such a run: all ranks compute the same gradient, and the work of all but one is wasted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from zeroengine.comm.replicas import RankSums
from zeroengine.errors import DivergenceError
from zeroengine.runtime.input_digest import digest_inputs
from zeroengine.utils.listed import listed
from zeroengine.utils.small_transfers import HostCopy

log = logging.getLogger("zeroengine")

# The number of micro-steps, at the start of a run, whose inputs are compared.
MICRO_STEPS = 3
MAX_RANKS_SHOWN = 8


class InputComparison:
    """Compares the first inputs of training over the ranks, once, and warns if ranks have the same inputs.

    [Note: No rank waits]
    Digests of inputs in a device's memory are computed there. One small collective exchanges the digests of all
    ranks, in the first update after ``MICRO_STEPS`` micro-steps in which all ranks meet. Only the number of its steps
    decides whether a rank takes part, not the inputs of its forwards, so all ranks take part. On a GPU the host reads
    the result one step later, when it has arrived, and on the CPU at once.

    Args:
        transport: Sums the digests over the ranks.
        device: The device that the model computes on.
        group_size: The number of consecutive ranks that share each sample.

    Attributes:
        is_recording: Whether forwards are still to be observed.
    """

    def __init__(self, transport: RankSums, device: torch.device, group_size: int = 1) -> None:
        self._transport, self._device, self._group_size = transport, device, group_size
        self.is_recording = transport.has_peers
        # The digest of each micro-step that has ended, and that of the micro-step in progress.
        self._digests: list[torch.Tensor | None] = []
        self._digest: torch.Tensor | None = None
        # The digests of all ranks, from the exchange until the host reads them.
        self._summed: HostCopy | None = None

    def observe(self, inputs: Any) -> None:
        """Note the inputs of a forward of the whole model. The first forward of a micro-step counts.

        Args:
            inputs: Tensors in nested containers.
        """
        # Evaluation may rightly use the same data on every rank, so forwards without autograd are not compared.
        if len(self._digests) >= MICRO_STEPS or self._digest is not None or not torch.is_grad_enabled():
            return
        # Reading values raises an error in torch.func, becomes a part of a trace, and breaks a capture of a CUDA graph.
        if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        self._digest = digest_inputs(inputs, self._device)

    def end_micro_step(self, may_exchange: bool) -> None:
        """Note the end of a micro-step. Call it on every rank.

        Args:
            may_exchange: Whether the micro-step ends with an update in which all ranks meet, and no collective is in
                progress.
        """
        # The exchange was a micro-step ago, so the result has arrived, and reading it does not stall the device.
        self._report()
        if not self.is_recording:
            return
        self._digests.append(self._digest)
        self._digest = None
        # The collective runs once. Every rank has counted the same micro-steps, so every rank takes part.
        if may_exchange and len(self._digests) >= MICRO_STEPS:
            self.is_recording = False
            # Each rank fills its own row, so the sum over ranks holds the digests of all.
            rows = torch.zeros(self._transport.world_size, MICRO_STEPS, dtype=torch.float64, device=self._device)
            for index, value in enumerate(self._digests[:MICRO_STEPS]):
                # A digest of inputs is never 0, which stands for inputs that cannot be compared.
                rows[self._transport.rank, index] = 0.0 if value is None else value
            self._summed = HostCopy(self._transport.all_reduce_scalars(rows.flatten(), "compare inputs"))
            if self._device.type == "cpu":
                self._report()

    def _report(self) -> None:
        """Read the sums, if there are any, and warn."""
        summed, self._summed = self._summed, None
        groups = [] if summed is None else ranks_with_same_inputs(summed.read())
        for ranks in groups:
            if len({rank // self._group_size for rank in ranks}) < len(ranks):
                raise DivergenceError(
                    f"ranks {listed(ranks, MAX_RANKS_SHOWN)} were given the same tokens, and ranks that share a sample "
                    f"(sequence_parallel_size is {self._group_size}) take a part of it each: pass each batch through "
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


def ranks_with_same_inputs(digests: Sequence[float]) -> list[list[int]]:
    """Return the groups of two or more ranks that have the same inputs, the largest first.

    A rank whose inputs are the same in every micro-step is in no group: they are constants, or one batch on purpose.

    Args:
        digests: ``MICRO_STEPS`` of each rank, in rank order; 0 for inputs that cannot be compared.
    """
    groups: dict[tuple[float, ...], list[int]] = {}
    for rank in range(len(digests) // MICRO_STEPS):
        row = tuple(digests[rank * MICRO_STEPS : (rank + 1) * MICRO_STEPS])
        if all(row) and len(set(row)) > 1:
            groups.setdefault(row, []).append(rank)
    return sorted((ranks for ranks in groups.values() if len(ranks) > 1), key=len, reverse=True)
