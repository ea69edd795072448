"""Checkpoints: one format for every stage, world size and precision, on torch Distributed Checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import exports

if TYPE_CHECKING:
    from .checkpointer import Checkpointer
    from .state import Trained
    from .store import Manifest, Store
    from .weights import Loaded, Weights
else:  # imported when first used: looking into a folder needs no torch
    __getattr__, __dir__ = exports(
        __name__,
        checkpointer=["Checkpointer"],
        state=["Trained"],
        store=["Manifest", "Store"],
        weights=["Loaded", "Weights"],
    )

__all__ = ["Checkpointer", "Loaded", "Manifest", "Store", "Trained", "Weights"]
