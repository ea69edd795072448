"""The names that a model's state dict gives to its parameters and buffers, which checkpoints and weights go by.

A parameter's own name says where it is registered, ``blocks.0._checkpoint_wrapped_module.up.weight``. Hooks of the
model may save it under another key, ``blocks.0.up.weight``, under several, or under none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroengine.checkpoint.entries import (
    MODEL,
    OPTIMIZER,
    UNSAVED,
    StateEntries,
    is_momentum,
    momentum_name,
    momentum_parameter,
)
from zeroengine.checkpoint.name_mapping import split_state_name
from zeroengine.runtime.model_state import ModelState


@dataclass(frozen=True)
class SavedNames:
    """The keys of a state dict, as ``plain_name`` gives them.

    Attributes:
        state: What ``model.state_dict()`` holds.
        keys: By own name of a parameter or buffer, the keys that hold it. Without any it is in no state dict.
        computed: The other values by key.
    """

    state: ModelState
    keys: Mapping[str, list[str]]
    computed: Mapping[str, Any]

    def own_names(self) -> dict[str, str]:
        """Return the own name of the parameter or buffer that each key holds."""
        return {key: own for own, keys in self.keys.items() for key in keys}

    def first(self, own: str) -> str:
        """Return the first key of a parameter or buffer; its own name if the state dict does not hold it."""
        return self.keys.get(own, [own])[0]

    def renamed(self, entries: StateEntries) -> StateEntries:
        """Return entries under the names that they have in a checkpoint."""
        return {self._in_checkpoint(name): entry for name, entry in entries.items()}

    def _in_checkpoint(self, name: str) -> str:
        if name.startswith(MODEL):
            own = name.removeprefix(MODEL)
            return MODEL + self.first(own) if own in self.keys else UNSAVED + own
        if is_momentum(name):
            return momentum_name(self.first(momentum_parameter(name)))
        own, key = split_state_name(name) or ("", "")
        return f"{OPTIMIZER}{self.first(own)}.{key}"
