"""Put the hyperparameters of a checkpoint's param groups into the optimizer."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zeroengine.checkpoint.content import named_param_groups
from zeroengine.checkpoint.engine_state import EngineTensors
from zeroengine.checkpoint.manifest import MANIFEST, Manifest
from zeroengine.errors import CheckpointError
from zeroengine.optim.caller_optimizer import FIXED_KEYS

# A negative value of these can only be damage, and it would ruin the training without an error.
NEVER_NEGATIVE = {"lr", "initial_lr", "max_lr", "min_lr", "eps", "weight_decay", "momentum"}
# The hyperparameters that an LR schedule writes and reads.
LEARNING_RATES = ("lr", "initial_lr")


def check_param_groups(
    tensors: EngineTensors, manifest: Manifest, path: Path, keys: Collection[str] | None, aliases: Mapping[str, str]
) -> None:
    """Check that a checkpoint's groups can be put into the optimizer.

    Args:
        tensors: The engine's tensors.
        manifest: The checkpoint's manifest.
        path: Its directory.
        keys: The hyperparameters to take over; None takes all.
        aliases: The own name of a parameter, by its other names.

    Raises:
        CheckpointError: They hold other parameters, or a hyperparameter has no sensible value.
    """
    if keys == ():
        return
    both = (named_param_groups(tensors), manifest.param_groups)
    own, saved = ([[aliases.get(name, name) for name in group["params"]] for group in groups] for groups in both)
    if keys is not None and len(own) != len(saved):
        raise CheckpointError(
            f"{path}: its LR schedule has rates for {len(saved)} groups of parameters, and the optimizer here has "
            f"{len(own)}. Make as many groups, or load with weights_only=True."
        )
    # A frozen parameter may be in a group at one time and left out at another, and this changes nothing. One that was
    # frozen at the save, or left out, takes over the hyperparameters of the group that it is in now.
    trainable = tensors.trainable_names().intersection(name for names in saved for name in names)
    if keys is None and [trainable & set(names) for names in own] != [trainable & set(names) for names in saved]:
        sizes = f"{list(map(len, saved))} parameters there, {list(map(len, own))} here"
        raise CheckpointError(
            f"{path}: the optimizer's groups hold other parameters ({sizes}). Make the same groups, or load with "
            "weights_only=True."
        )
    # Only the manifest of format 1 has no checksum, yet a check of values is cheap for all of them.
    for group, key, value in _saved_hyperparameters(tensors, manifest, keys):
        if not _is_acceptable(key, value, group.get(key)):
            raise CheckpointError(
                f"{path} is damaged: its {MANIFEST} has {value!r} for the optimizer's {key}, which is "
                f"{group.get(key)!r} here"
            )


def apply_param_groups(tensors: EngineTensors, manifest: Manifest, keys: Collection[str] | None) -> None:
    """Set the hyperparameters to those of a checkpoint, as `torch.optim.Optimizer.load_state_dict` does."""
    for group, key, value in _saved_hyperparameters(tensors, manifest, keys):
        present = group.get(key)
        if isinstance(present, torch.Tensor):
            # A captured step reads the tensor, so the tensor has to stay the same object.
            present.copy_(torch.as_tensor(value))
        else:
            # JSON has no tuples, and some optimizers require them.
            group[key] = tuple(value) if isinstance(present, tuple) else value


def _saved_hyperparameters(
    tensors: EngineTensors, manifest: Manifest, keys: Collection[str] | None
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield each group of the optimizer with the key and the value of each of its hyperparameters in a checkpoint."""
    # Without hyperparameters to take over, another optimizer may have other groups.
    for group, saved_group in zip(tensors.optimizer.param_groups, manifest.param_groups, strict=keys != ()):
        for key, value in saved_group.items():
            if key not in FIXED_KEYS and (keys is None or key in keys):
                yield group, key, value


def _is_acceptable(key: str, saved: Any, present: Any) -> bool:
    """Return whether a well-known hyperparameter of a checkpoint can take the place of the present one."""
    if key == "betas" and isinstance(present, (tuple, list)):
        is_list = isinstance(saved, (tuple, list)) and len(saved) == len(present)
        return is_list and all(_is_number(beta) and 0 <= beta < 1 for beta in saved)
    # Rules of users have hyperparameters that are unknown here. These are taken as they are.
    is_scalar = isinstance(present, torch.Tensor) and present.numel() == 1
    if key in NEVER_NEGATIVE and (is_scalar or isinstance(present, (int, float))):
        return _is_number(saved) and saved >= 0
    return True


def _is_number(value: Any) -> bool:
    # JSON has integers that no float holds.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
