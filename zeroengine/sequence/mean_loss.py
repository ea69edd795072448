"""The mean of a loss over tokens that several ranks have parts of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeroengine.sequence.group import HasSequenceGroup, SequenceGroup, group_for
from zeroengine.utils.compiler_disable import disable_compile


class _MeanOverGroup(torch.autograd.Function):
    """The sum of all totals over the sum of all counts."""

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, total: Tensor, count: Tensor) -> Tensor:
        own = torch.stack([total.double(), count.to(total.device, torch.float64, non_blocking=True)])
        # The sum has the order of the ranks, so all of them have the same bits.
        total_of_group, count_of_group = group.all_gather(own, "mean_loss").cumsum(0)[-1]
        # Each rank begins its backward with the gradient of the mean, and gradients are averaged over all ranks.
        ctx.factor = group.size / count_of_group
        return (total_of_group / count_of_group).to(total.dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, (grad * ctx.factor).to(grad.dtype), None


def mean_loss(total: Tensor, count: Tensor | float, *, engine: HasSequenceGroup | None = None) -> Tensor:
    """Return the mean of a loss over the tokens of all ranks that share a sample.

    The parts of a sequence may have different numbers of labels, so the mean of each rank's own part would weigh tokens
    differently:

        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss = zeroengine.mean_loss(total, (labels != -100).sum())

    Args:
        total: The sum of the losses of this rank's tokens. 0-d.
        count: The number of these tokens, or the sum of their weights. A number, or 0-d.
        engine: The engine whose ranks share the sample. None: the one whose model calls this, or the only one.

    Returns:
        The same value on all of these ranks, 0-d, in the dtype of ``total``. Without sequence parallelism
        ``total / count``.
    """
    return mean_of_group(group_for(engine), total, count)


@disable_compile
def mean_of_group(group: SequenceGroup | None, total: Tensor, count: Tensor | float) -> Tensor:
    """Do the same as ``mean_loss`` for the ranks of a group."""
    if group is None:
        return total / count
    if total.requires_grad:
        group.comparison.note("means")
    # A copy of a number would make the host wait for the device, and filling memory with it does not.
    count = count if isinstance(count, Tensor) else torch.full_like(total, count, dtype=torch.float64)
    return _MeanOverGroup.apply(group, total, count)  # type: ignore[no-untyped-call, no-any-return]
