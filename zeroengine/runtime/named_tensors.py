"""Choose parameters and buffers of a model by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.cut import plain_name
from zeroengine.runtime.unit import Unit

# The names that a message suggests.
NUM_SHOWN = 3


def named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what ``model.state_dict()`` holds: parameters and persistent buffers, each under all of its names."""
    # Duplicates are kept, for `model.state_dict()` lists a tied parameter under each of its names.
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        yield from ((f"{dot}{name}", param) for name, param in module._parameters.items() if param is not None)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{dot}{name}", buffer


def sorted_patterns(names: str | Iterable[str] | None, call: str) -> list[str] | None:
    """Return what the user passed as ``names`` in an order that all ranks share; None stands for all names.

    Raises:
        ZeroEngineError: There are none, or some are no texts.
    """
    if names is None:
        return None
    patterns = [names] if isinstance(names, str) else list(names)
    others = [pattern for pattern in patterns if not isinstance(pattern, str)]
    if others:
        raise ZeroEngineError(
            f'{call}: names are texts such as "head.weight" or "*.lora_A.*"; found {others[0]!r:.100}'
        )
    if not patterns:
        raise ZeroEngineError(f"{call}: names is empty. Leave it out to take all parameters and buffers.")
    return sorted(patterns)


def choose_names(
    model: nn.Module, units: Sequence[Unit], patterns: list[str] | None, *, trainable_only: bool, call: str
) -> set[str]:
    """Return the names of the parameters and persistent buffers that are asked for, as ``plain_name`` gives them.

    Args:
        model: The model.
        units: Its units.
        patterns: Qualified names, or patterns of ``fnmatch``. None takes all.
        trainable_only: Whether to leave out buffers, and parameters that were frozen at ``initialize``.
        call: The public method, for messages.

    Raises:
        ZeroEngineError: A pattern matches nothing, or there is no trainable parameter.
    """
    all_tensors = {plain_name(name): tensor for name, tensor in named_state(model)}
    trainable = {param for unit in units if unit.trainable for param in unit.params}
    candidates = {name for name, tensor in all_tensors.items() if not trainable_only or tensor in trainable}
    if not candidates:
        raise ZeroEngineError(f"{call}: trainable_only=True leaves nothing, for every parameter of the model is frozen")
    if patterns is None:
        return candidates
    chosen: set[str] = set()
    for pattern in map(plain_name, patterns):
        # A name may contain characters that mean something in a pattern.
        matches = {pattern} & candidates or set(fnmatch.filter(candidates, pattern))
        if not matches and (pattern in all_tensors or fnmatch.filter(all_tensors, pattern)):
            raise ZeroEngineError(
                f"{call}: {pattern!r} matches only frozen parameters or buffers, which trainable_only=True leaves out"
            )
        if not matches:
            nearest = ", ".join(get_close_matches(pattern, sorted(candidates), NUM_SHOWN, cutoff=0.0))
            raise ZeroEngineError(f"{call}: {pattern!r} matches no name. The nearest names are: {nearest}")
        chosen |= matches
    return chosen
