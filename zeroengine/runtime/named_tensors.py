"""Choose values of a state dict by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.cut import plain_name
from zeroengine.runtime.state_dict_reads import ModelState
from zeroengine.runtime.unit import Unit

# The names that a message suggests.
NUM_SHOWN = 3


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
    state: ModelState, units: Sequence[Unit], patterns: list[str] | None, *, trainable_only: bool, call: str
) -> set[str]:
    """Return the names of the values of a state dict that are asked for, as ``plain_name`` gives them.

    Args:
        state: What ``model.state_dict()`` holds.
        units: The units of the model.
        patterns: Qualified names, or patterns of ``fnmatch``. None takes all.
        trainable_only: Whether to take parameters alone, and not those that were frozen at ``initialize``.
        call: The public method, for messages.

    Raises:
        ZeroEngineError: A pattern matches nothing, or there is no trainable parameter.
    """
    all_names = {plain_name(key): state.tensors.get(key) for key in state.values}
    trainable = {param for unit in units if unit.trainable for param in unit.params}
    trainable_names = {state.slot_names[param] for param in trainable}
    candidates = {
        name
        for name, tensor in all_names.items()
        # What a hook computed under the name of a parameter counts as that parameter.
        if not trainable_only or (name in trainable_names if tensor is None else tensor in trainable)
    }
    if not candidates:
        raise ZeroEngineError(f"{call}: trainable_only=True leaves nothing, for every parameter of the model is frozen")
    if patterns is None:
        return candidates
    chosen: set[str] = set()
    for pattern in map(plain_name, patterns):
        # A name may contain characters that mean something in a pattern.
        matches = {pattern} & candidates or set(fnmatch.filter(candidates, pattern))
        if not matches and (pattern in all_names or fnmatch.filter(all_names, pattern)):
            raise ZeroEngineError(
                f"{call}: {pattern!r} matches only frozen parameters or buffers, which trainable_only=True leaves out"
            )
        if not matches:
            nearest = ", ".join(get_close_matches(pattern, sorted(candidates), NUM_SHOWN, cutoff=0.0))
            raise ZeroEngineError(f"{call}: {pattern!r} matches no name. The nearest names are: {nearest}")
        chosen |= matches
    return chosen
