"""The mean of numbers of the user over the ranks, each with its weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zeroengine.comm.group import Group
from zeroengine.engine.call_checks import check_logged_values
from zeroengine.runtime.step_losses import check_weight
from zeroengine.utils.tensors import to_device


def mean_over_ranks(values: Mapping[str, Any], weight: Any, group: Group) -> dict[str, torch.Tensor]:
    """Return the weighted mean of each value over the ranks. A collective.

    Args:
        values: Numbers, or tensors of one element, by names that are the same on all ranks.
        weight: The weight of this rank's values, a number of at least 0 or a tensor of one. 0: they do not count.
        group: The ranks.

    Returns:
        0-d float64 tensors on the device of the ranks; NaN where all weights are 0.

    Raises:
        ZeroEngineError: A value or the weight is something else.
    """
    check_logged_values(values, "reduce()")
    check_weight(weight)
    facts = torch.stack([_on(group.device, fact) for fact in (*values.values(), weight)])
    weights = facts[-1].clone()
    # A value without weight may be no number.
    sums = torch.where(weights == 0, 0.0, facts * weights)
    sums[-1] = weights
    group.all_reduce(sums, f"of {', '.join(values)}")
    return dict(zip(values, (sums[:-1] / sums[-1]).unbind(), strict=True))


def _on(device: torch.device, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.device == device:
        return value.detach().to(torch.float64).view(())
    return to_device([float(value)], device, torch.float64)[0]
