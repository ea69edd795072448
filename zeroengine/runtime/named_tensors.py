"""Choose values of a state dict by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.cut import plain_name

# The names that a message suggests.
NUM_SHOWN = 3


def sorted_patterns(names: str | Iterable[str] | None, call: str) -> list[str] | None:
    """Return what the user passed as ``names`` in an order that all ranks share; None stands for all names.

    Raises:
        ZeroEngineError: There are none, or some are no texts.
    """
    if names is None:
        return None
    patterns = list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [names]
    others = [pattern for pattern in patterns if not isinstance(pattern, str)]
    if others:
        raise ZeroEngineError(
            f'{call}: names are texts such as "head.weight" or "*.lora_A.*"; found {others[0]!r:.100}'
        )
    if not patterns:
        raise ZeroEngineError(f"{call}: names is empty. Leave it out to take all parameters and buffers.")
    return sorted(patterns)


def choose_names(
    is_trainable: Mapping[str, bool], patterns: list[str] | None, *, trainable_only: bool, call: str
) -> set[str]:
    """Return the names that are asked for.

    Args:
        is_trainable: For each name, as ``plain_name`` gives it, whether the parameter is trained.
        patterns: Qualified names, or patterns of ``fnmatch``. None takes all.
        trainable_only: Whether to take parameters alone, and not those that were frozen at ``initialize``.
        call: The public method, for messages.

    Raises:
        ZeroEngineError: A pattern matches nothing, or there is no trainable parameter.
    """
    candidates = {name for name, trainable in is_trainable.items() if trainable or not trainable_only}
    if not candidates:
        raise ZeroEngineError(f"{call}: trainable_only=True leaves nothing, for every parameter of the model is frozen")
    if patterns is None:
        return candidates
    chosen: set[str] = set()
    for pattern in map(plain_name, patterns):
        # A name may contain characters that mean something in a pattern.
        matches = {pattern} & candidates or set(fnmatch.filter(candidates, pattern))
        if not matches and (pattern in is_trainable or fnmatch.filter(is_trainable, pattern)):
            raise ZeroEngineError(
                f"{call}: {pattern!r} matches only frozen parameters or buffers, which trainable_only=True leaves out"
            )
        if not matches:
            nearest = ", ".join(get_close_matches(pattern, sorted(candidates), NUM_SHOWN, cutoff=0.0))
            raise ZeroEngineError(f"{call}: {pattern!r} matches no name. The nearest names are: {nearest}")
        chosen |= matches
    return chosen
