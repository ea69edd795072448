"""Bytes of the outer step of ``local_steps``. See ``optim.outer_step`` and ``optim.replica_mean``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.config import Config
from zeroengine.memory.unit_bytes import UnitBytes
from zeroengine.optim.replica_mean import NUM_BUFFERS, chunk_capacity, sum_dtype


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


def exchange_bytes(units: Sequence[UnitBytes], world_size: int, num_replicas: int) -> int:
    """Return the bytes of the buffers through which replicas exchange their parameters.

    Args:
        units: The units.
        world_size: The ranks of a replica.
        num_replicas: The number of replicas.
    """
    trainable = [unit for unit in units if unit.gradients is not None]
    has_copies = any(unit.degrees.optimizer < world_size for unit in trainable)
    return (NUM_BUFFERS + has_copies) * _buffer_numel(trainable, world_size, num_replicas) * torch.float32.itemsize


def received_exchange_bytes(
    units: Sequence[UnitBytes], world_size: int, num_replicas: int, transport: type[TransportTraits]
) -> int:
    """Return the most bytes that the transport between replicas keeps for what arrives. See ``exchange_bytes``.

    Args:
        units, world_size, num_replicas: As for ``exchange_bytes``.
        transport: The class of the transport between the replicas.
    """
    trainable = [unit for unit in units if unit.gradients is not None]
    numel = sum(piece_numel(unit, world_size) for unit in trainable)
    capacity = _buffer_numel(trainable, world_size, num_replicas)
    # Each kind of values ends with a chunk of its own size. Two sums are under way.
    kinds = {(sum_dtype(unit.master_dtype), unit.degrees.optimizer) for unit in trainable}
    num_sums = len(kinds) + (NUM_BUFFERS if numel > capacity else 0)
    numel = transport.staged_numel(num_replicas, capacity // num_replicas, by_host=transport.adds_by_host)
    return num_sums * numel * torch.float32.itemsize


def _buffer_numel(trainable: Sequence[UnitBytes], world_size: int, num_replicas: int) -> int:
    return chunk_capacity(sum(piece_numel(unit, world_size) for unit in trainable), num_replicas)
