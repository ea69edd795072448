"""Checkpoints: one format for every stage, world size and precision, on torch Distributed Checkpoint."""

from .checkpointer import Checkpointer
from .state import Trained
from .store import Manifest, Store

__all__ = ["Checkpointer", "Manifest", "Store", "Trained"]
