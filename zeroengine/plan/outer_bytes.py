"""Bytes of the outer step of ``local_steps``. See ``optim.outer_step`` and ``optim.replica_mean``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroengine.config import Config
from zeroengine.optim.replica_mean import NUM_BUFFERS, chunk_capacity, sum_dtype
from zeroengine.plan.unit_bytes import UnitBytes


def outer_element_sizes(unit: UnitBytes, config: Config) -> tuple[int, ...]:
    """Return the bytes of an element of each state of the outer step: the anchor and the momentum, or none."""
    if unit.gradients is None or config.local_steps is None or config.local_steps.nesterov is None:
        return ()
    dtype = unit.master_dtype
    return 2 * ((dtype if dtype.is_complex else sum_dtype(dtype)).itemsize,)


def piece_numel(unit: UnitBytes, world_size: int) -> int:
    """Return the elements of a unit that a rank averages with its counterparts; 0 if the unit is frozen.

    Args:
        unit: The unit.
        world_size: The ranks of a replica.
    """
    return 0 if unit.gradients is None else unit.layout.numel // world_size


def exchange_bytes(units: Sequence[UnitBytes], config: Config, world_size: int, num_replicas: int) -> int:
    """Return the bytes of the buffers through which replicas exchange their parameters.

    Args:
        units: The units.
        config: The resolved configuration.
        world_size: The ranks of a replica.
        num_replicas: The number of replicas.
    """
    if config.local_steps is None:
        return 0
    trainable = [unit for unit in units if unit.gradients is not None]
    has_copies = any(unit.degrees.optimizer < world_size for unit in trainable)
    numel = sum(piece_numel(unit, world_size) for unit in trainable)
    return (NUM_BUFFERS + has_copies) * chunk_capacity(numel, num_replicas) * torch.float32.itemsize
