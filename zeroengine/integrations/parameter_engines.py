"""Which engines parameters belong to."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zeroengine.engine.engine import Engine
from zeroengine.engine.gathered import owner_of


def engines_of(params: Iterable[torch.Tensor]) -> list[Engine]:
    """Return the engines that parameters belong to, each once, in the order of the parameters."""
    owners = (owner_of(param) for param in params if isinstance(param, nn.Parameter))
    engines = dict.fromkeys(owner.engine() for owner in owners if owner is not None)
    return [engine for engine in engines if engine is not None]
