"""Store the optimizer's parameter groups in a checkpoint, with names for parameters, and put them back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from zeroengine.checkpoint.checkpointed_parts import CheckpointedParts
from zeroengine.checkpoint.manifest import MANIFEST, Manifest
from zeroengine.errors import CheckpointError

# A negative value of these can only be damage, and it would ruin the training without an error.
NEVER_NEGATIVE = {"lr", "initial_lr", "max_lr", "min_lr", "eps", "weight_decay", "momentum"}


def named_param_groups(parts: CheckpointedParts) -> list[dict[str, Any]]:
    """Return the optimizer's groups, with names for parameters."""
    # Objects have no meaning in a file, so parameters are stored by name.
    units = parts.units
    names = {param: slot.name for unit in units for param, slot in zip(unit.params, unit.layout.slots, strict=True)}
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[param] for param in group["params"]]}
        for group in parts.optimizer.param_groups
    ]


def check_param_groups(parts: CheckpointedParts, manifest: Manifest, path: Path) -> None:
    """Check that a checkpoint's groups can be put into the optimizer.

    Raises:
        CheckpointError: They hold other parameters, or a hyperparameter has no sensible value.
    """
    own = [sorted(group["params"]) for group in named_param_groups(parts)]
    saved = [sorted(group["params"]) for group in manifest.param_groups]
    # A frozen parameter may be in a group at one time and left out at another, and this changes nothing.
    trainable = {slot.name for shard in parts.optimizer.shards for slot in shard.unit.layout.slots}
    if [_only(group, trainable) for group in own] != [_only(group, trainable) for group in saved]:
        sizes = f"{[len(group) for group in saved]} parameters there, {[len(group) for group in own]} here"
        raise CheckpointError(
            f"{path}: the optimizer's groups hold other parameters ({sizes}). Make the same groups, or load with "
            "weights_only=True."
        )
    # Only the manifest of format 1 has no checksum, yet a check of values is cheap for all of them.
    for group, saved_group in zip(parts.optimizer.param_groups, manifest.param_groups, strict=True):
        for key, value in saved_group.items():
            if key != "params" and not _is_acceptable(key, value, group.get(key)):
                raise CheckpointError(
                    f"{path} is damaged: its {MANIFEST} has {value!r} for the optimizer's {key}, which is "
                    f"{group.get(key)!r} here"
                )


def apply_param_groups(parts: CheckpointedParts, manifest: Manifest) -> None:
    """Set the hyperparameters to those of a checkpoint, as `torch.optim.Optimizer.load_state_dict` does."""
    for group, saved_group in zip(parts.optimizer.param_groups, manifest.param_groups, strict=True):
        for key, value in saved_group.items():
            present = group.get(key)
            if isinstance(present, torch.Tensor) and key != "params":
                # A captured step reads the tensor, so the tensor has to stay the same object.
                present.copy_(torch.as_tensor(value))
            elif key != "params":
                # JSON has no tuples, and some optimizers require them.
                group[key] = tuple(value) if isinstance(present, tuple) else value


def _only(names: list[str], trainable: set[str]) -> list[str]:
    return [name for name in names if name in trainable]


def _is_acceptable(key: str, saved: Any, present: Any) -> bool:
    """Return whether a well-known hyperparameter of a checkpoint can take the place of the present one."""
    if key == "betas" and isinstance(present, (tuple, list)):
        return isinstance(saved, (tuple, list)) and len(saved) == len(present) and all(map(_is_number, saved))
    # Rules of users have hyperparameters that are unknown here. These are taken as they are.
    if key in NEVER_NEGATIVE and (isinstance(present, (int, float)) or _is_scalar(present)):
        return _is_number(saved) and saved >= 0
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1
