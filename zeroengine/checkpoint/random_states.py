"""Collect and restore the states of this process's random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's generator, torch's, and NumPy's where the process has imported it."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    # Importing NumPy only to save a generator that nobody has used would cost time and memory.
    if "numpy" in sys.modules:
        # The restricted unpickler reads tensors but no arrays. torch has no arithmetic for uint32, so int64 carries the
        # values.
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Put back what `random_states` returned."""
    # A state of another device is left alone, for the checkpoint may be loaded on a machine without a GPU.
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
