"""Checkpoints: one format for every stage, world size and precision, on torch Distributed Checkpoint."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpointer import Checkpointer
    from .state import Trained
    from .store import Manifest, Store
    from .weights import Loaded, Weights

__all__ = ["Checkpointer", "Loaded", "Manifest", "Store", "Trained", "Weights"]

# Imported when first used: looking into a folder needs no torch.
_HOMES = {
    "Checkpointer": "checkpointer",
    "Loaded": "weights",
    "Manifest": "store",
    "Store": "store",
    "Trained": "state",
    "Weights": "weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    return value
