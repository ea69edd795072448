"""Digests of parameters, gradients and moments by unit, equal for every stage, degree and place of a state.

[Note: Digest of a unit]
The digest of a unit is a sum modulo 2^64, over its parameters, of the digest of the parameter's elements
(``zeroengine.ops.digest``) times an odd number that the parameter's name gives. Both sums are linear. So the numbers of
all ranks that hold a state once add up to the digest of the state, whatever the degree, and ranks that hold copies of a
shard have equal numbers. A factor that is odd keeps differences: a change of one word always changes the digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from zeroengine import ops
from zeroengine.disk.mapped_memory import populate
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.layout import ShardSpan
from zeroengine.runtime.unit import Unit

# What is digested of each unit. "parameters" are the masters, or the parameters of a frozen unit. "weights" are what
# the model computes with, where they are not the masters and other ranks have copies of them; they are only compared.
KINDS = ("parameters", "gradients", "moments", "weights")


# Values of a state that lie one after another: the state's name, the values, and the index of the first one in the
# whole state. Values of 8 bytes or more may begin anywhere, others at a multiple of 8 bytes.
StateRun = tuple[str, torch.Tensor, int]


def weights_digests(units: Sequence[Unit], world_size: int) -> list[torch.Tensor | None]:
    """Return this rank's digest of the weights of each unit; None: they are no copies, or are the masters.

    Call it where no unit is being gathered.
    """
    return [
        _digest_of_weights(unit)
        if unit.trainable
        and unit.degrees.parameters < world_size
        and (unit.has_master or unit.degrees.parameters < unit.degrees.optimizer)
        else None
        for unit in units
    ]


def state_digests(
    units: Sequence[Unit], optimizer: ShardedOptimizer, *, gradients: bool
) -> list[list[torch.Tensor | None]]:
    """Return this rank's digests: for the first three of ``KINDS``, that of each unit. None: it has no such state.

    Args:
        units: All units of the model.
        optimizer: Has the masters, the moments and the gradients. No result of a step may be awaited.
        gradients: Whether the gradients are those of a step.
    """
    shards = {shard.unit: shard for shard in optimizer.shards}
    digests: list[list[torch.Tensor | None]] = [[], [], []]
    for unit in units:
        shard = shards.get(unit)
        if shard is None:
            of_unit = [_digest_of_weights(unit), None, None]
        else:
            masters, reduced = (_runs(unit, shard.spans(), values) for values in (shard.master, shard.gradient))
            of_unit = [_digest(masters), _digest(reduced) if gradients else None, _digest(_moments(shard, optimizer))]
            # All states together may exceed memory.
            shard.evict(shard.master, *optimizer.state_of(shard).tensors(shard))
            if shard.unit_grads.store is not None:
                shard.unit_grads.store.evict(shard.gradient)
        for of_kind, digest in zip(digests, of_unit, strict=True):
            of_kind.append(digest)
    return digests


def _digest_of_weights(unit: Unit) -> torch.Tensor | None:
    digest = _digest(_runs(unit, unit.layout.spans(unit.rank, unit.degrees.parameters), unit.shard))
    if unit.offloaded_shards is not None:
        unit.offloaded_shards.store.evict(unit.shard)
    return digest


def _runs(unit: Unit, spans: Iterable[ShardSpan], values: torch.Tensor) -> Iterator[StateRun]:
    """Yield the part of each parameter in ``values``, which are elements of a shard."""
    for span in spans:
        yield unit.layout.slots[span.param_index].name, values[span.shard_slice], span.param_offset


def _moments(shard: OptimizerShard, optimizer: ShardedOptimizer) -> Iterator[StateRun]:
    """Yield the optimizer's state, without what is one number for each parameter, such as step counts."""
    shard_state = optimizer.state_of(shard)
    for span in shard_state.spans(shard):
        name = shard.unit.layout.slots[span.param_index].name
        state = shard_state.of(shard, span)
        for key, values in state.elements.items():
            yield f"{name}.{key}", values[: span.numel], span.param_offset
        for key, values in state.scales.items():
            # A shard may begin at any block. In 8 bytes each, the scales of two shards add up all the same.
            yield f"{name}.{key}.scales", values.double(), span.param_offset // ops.MOMENT_BLOCK
        # What belongs to a whole parameter is kept where the parameter is whole.
        for key, values in state.numbers.items():
            if values.numel() > 1:
                yield f"{name}.{key}", values, 0


def _digest(runs: Iterable[StateRun]) -> torch.Tensor | None:
    """Return the digest of all runs, 0-d int64, without waiting for a device. None: there are none."""
    digests, factors = [], []
    for name, values, first in runs:
        # The values may be part of a mapped file, whose disk may fail.
        populate(values)
        digests.append(ops.digest(values, first))
        factors.append(_factor(name))
    if not digests:
        return None
    device = digests[0].device
    constants = torch.tensor(factors, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return torch.stack(digests).mul_(constants.to(device, non_blocking=True)).sum()


@cache
def _factor(name: str) -> int:
    """Return the odd number of a state's name, as int64."""
    return int(np.uint64(xxhash.xxh3_64_intdigest(name.encode()) | 1).astype(np.int64))


# -- the numbers of all ranks ---------------------------------------------------------------------


def whole_digests(numbers: np.ndarray, degrees: Sequence[int]) -> np.ndarray:
    """Return the digest of each whole state.

    Args:
        numbers: uint64, of shape (ranks, states): that of each rank's shard.
        degrees: The number of ranks that hold each state once.

    Returns:
        uint64, of shape (states,).
    """
    ranks = np.arange(len(numbers))[:, None]
    counted = np.where(ranks < np.asarray(degrees)[None, :], numbers, np.uint64(0))
    result: np.ndarray = counted.sum(axis=0, dtype=np.uint64)
    return result


class Difference(NamedTuple):
    """Ranks whose copy of a shard is not that of the others.

    Attributes:
        state: The index of the state.
        ranks: The ranks that differ from most; all with a copy, where no value has more of them than another.
    """

    state: int
    ranks: tuple[int, ...]


def differences(numbers: np.ndarray, degrees: Sequence[tuple[Degrees, int]]) -> list[Difference]:
    """Return where ranks that hold copies of one shard have different numbers.

    Args:
        numbers: As for ``whole_digests``.
        degrees: The degrees of each state's unit, and which of them is that of the state.
    """
    found = []
    for degrees_of_unit, degree in dict.fromkeys(degrees):
        columns = [i for i, of_state in enumerate(degrees) if of_state == (degrees_of_unit, degree)]
        shards: dict[int, list[int]] = {}
        for rank in range(len(numbers)):
            shards.setdefault(degrees_of_unit.index(rank, degree), []).append(rank)
        for ranks in shards.values():
            copies = numbers[np.ix_(ranks, columns)]
            for column in np.flatnonzero((copies != copies[0]).any(axis=0)):
                found.append(_difference(columns[column], ranks, copies[:, column].tolist()))
    return sorted(found)


def _difference(state: int, ranks: Sequence[int], values: Sequence[int]) -> Difference:
    (right, most), (_, second), *_ = Counter(values).most_common()
    # A tie does not say who is right.
    is_tie = second == most
    return Difference(state, tuple(r for r, value in zip(ranks, values, strict=True) if is_tie or value != right))
