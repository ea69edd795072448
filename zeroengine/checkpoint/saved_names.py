"""The names that a model's state dict gives to its parameters and buffers, which checkpoints and weights go by.

A parameter's own name says where it is registered, ``blocks.0._checkpoint_wrapped_module.up.weight``. Hooks of the
model may save it under another key, ``blocks.0.up.weight``, under several, or under none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroengine.checkpoint.entries import MODEL, OPTIMIZER, UNSAVED
from zeroengine.checkpoint.name_mapping import split_state_name
from zeroengine.runtime.state_dict_reads import ModelState


@dataclass(frozen=True)
class SavedNames:
    """The keys of a state dict, as ``plain_name`` gives them.

    Attributes:
        state: What ``model.state_dict()`` holds.
        keys: By own name of a parameter or buffer, the keys that hold it. Without any it is in no state dict.
        computed: The other values by key.
        aliases: The own name of a parameter or buffer, by its keys and its other names in the model.
    """

    state: ModelState
    keys: Mapping[str, list[str]]
    computed: Mapping[str, Any]
    aliases: Mapping[str, str]

    def first(self, own: str) -> str:
        """Return the first key of a parameter or buffer; its own name if the state dict does not hold it."""
        return self.keys.get(own, [own])[0]

    def in_checkpoint(self, own: str) -> str:
        """Return the name that a parameter or buffer has in a checkpoint."""
        return MODEL + self.first(own) if own in self.keys else UNSAVED + own

    def state_in_checkpoint(self, name: str) -> str:
        """Return the name that optimizer state, ``optimizer.state.<own name>.<key>``, has in a checkpoint."""
        own, key = split_state_name(name) or ("", "")
        return f"{OPTIMIZER}{self.first(own)}.{key}"
