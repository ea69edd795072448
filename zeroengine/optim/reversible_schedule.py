"""Steps an LR schedule such that the step can be reverted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch


def step_reversibly(step: Callable[[], None], schedule: Any, groups: Sequence[dict[str, Any]]) -> Callable[[], None]:
    """Call ``step``, which steps ``schedule`` and so changes ``groups``. Return a function that reverts both."""
    if schedule is None:
        step()
        return lambda: None
    # A step may change the containers that state_dict returns, so they are copied.
    state, values_before = copy.deepcopy(schedule.state_dict()), _hyperparameters(groups)
    step()
    values_after = _hyperparameters(groups)

    def revert() -> None:
        schedule.load_state_dict(state)
        # A hyperparameter that the user has written since does not have the schedule's value, and is not reverted.
        for group, before, after in zip(groups, values_before, values_after, strict=True):
            for key, value in before.items():
                if isinstance(value, torch.Tensor):
                    # A schedule writes into a tensor in place, so every reference to it must see the old value again.
                    group[key].copy_(value)
                elif group[key] == after[key]:
                    group[key] = value

    return revert


def _hyperparameters(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        # The schedule writes into tensors in place.
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        for group in groups
    ]
