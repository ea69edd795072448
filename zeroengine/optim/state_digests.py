"""Digests of parameters, gradients and moments by unit, equal for every stage, degree and place of a state.

[Note: Digest of a unit]
The digest of a unit is a sum modulo 2^64, over its parameters, of the digest of the parameter's elements
(``zeroengine.ops.digest``) times an odd number that the parameter's name gives. Both sums are linear. So the numbers of
all ranks that hold a state once add up to the digest of the state, whatever the degree, and ranks that hold copies of a
shard have equal numbers. A factor that is odd keeps differences: a change of one word always changes the digest.

Of a split parameter each rank takes its elements at their places in the whole parameter, so the numbers of all slices
add up to the digest of the whole. A digest has words of 8 bytes, so slices have to begin and end with words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from zeroengine import ops
from zeroengine.config import Config
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.layout import ShardSpan
from zeroengine.partition.slices import pieces_of_slice, slice_of
from zeroengine.runtime.unit import Unit

# What is digested of each unit. "parameters" are the masters, or the parameters of a frozen unit. "weights" are what
# the model computes with, where they are not the masters and other ranks have copies of them; they are only compared.
KINDS = ("parameters", "gradients", "moments", "weights")


# Values of a state: the state's name, the values, the index of the first one in the whole state, and 0; or rows (2-D)
# that lie apart in the whole state, from the first value of a row to that of the next one so many values. Values of
# 8 bytes or more may begin anywhere, others at a multiple of 8 bytes.
StateRun = tuple[str, torch.Tensor, int, int]


def check_words(plans: Iterable[UnitPlan], config: Config) -> None:
    """Check that slices of split parameters begin and end with words of digests.

    Raises:
        ZeroEngineError: Those of this rank do not.
    """
    for plan in plans:
        dtypes = plan.dtype, plan.algorithm.moments_dtype, config.accumulation_dtype(plan.dtype)
        itemsize = min(dtype.itemsize for dtype in dtypes)
        for name, param in plan.params:
            part = slice_of(param)
            if part is None or part.dim is None:
                continue
            size, inner = part.shape[part.dim], math.prod(part.shape[part.dim + 1 :])
            ends = {size, *(run.start for run in part.runs), *(run.start + run.size for run in part.runs)}
            # Behind the last element nothing follows.
            ends -= {size} if math.prod(part.shape[: part.dim]) == 1 else set()
            if any(end * inner * itemsize % 8 for end in ends):
                raise ZeroEngineError(
                    f"parameter {name} of shape {part.shape} is split within 8 bytes, the words of digests: split "
                    f"dimension {part.dim} into parts of multiples of {8 // itemsize}, or write "
                    '"digests": {"every": null}'
                )


def weights_digests(units: Sequence[Unit], num_holders: Sequence[int]) -> list[torch.Tensor | None]:
    """Return this rank's digest of the weights of each unit; None: they are no copies, or are the masters.

    Call it where no unit is being gathered.

    Args:
        units: All units of the model.
        num_holders: The number of ranks that hold each unit, partitioned or as copies.
    """
    return [
        _digest_of_weights(unit)
        if unit.trainable
        and unit.degrees.parameters < number
        and (unit.has_master or unit.degrees.parameters < unit.degrees.optimizer)
        else None
        for unit, number in zip(units, num_holders, strict=True)
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
        yield from _placed(unit, span, unit.layout.slots[span.param_index].name, values[span.shard_slice])


def _placed(unit: Unit, span: ShardSpan, name: str, values: torch.Tensor) -> Iterator[StateRun]:
    """Yield the values of a span with their places in the whole parameter."""
    param = unit.params[span.param_index]
    part = slice_of(param)
    if part is None or part.dim is None:
        yield name, values, span.param_offset, 0
        return
    populate(values)
    for box, piece in pieces_of_slice(param, span.param_offset, values):
        rows = piece.reshape(-1, math.prod(box.sizes[part.dim :]))
        yield name, rows, box.start, math.prod(part.shape[part.dim :])


def _moments(shard: OptimizerShard, optimizer: ShardedOptimizer) -> Iterator[StateRun]:
    """Yield the optimizer's state, without what is one number for each parameter, such as step counts."""
    shard_state = optimizer.state_of(shard)
    for span in shard_state.spans(shard):
        name = shard.unit.layout.slots[span.param_index].name
        state = shard_state.of(shard, span)
        for key, values in state.elements.items():
            yield from _placed(shard.unit, span, f"{name}.{key}", values[: span.numel])
        for key, values in state.scales.items():
            # A shard may begin at any block. In 8 bytes each, the scales of two shards add up all the same.
            yield f"{name}.{key}.scales", values.double(), span.param_offset // ops.MOMENT_BLOCK, 0
        # What belongs to a whole parameter is kept where the parameter is whole.
        for key, values in state.numbers.items():
            if values.numel() > 1:
                yield f"{name}.{key}", values, 0, 0


def _digest(runs: Iterable[StateRun]) -> torch.Tensor | None:
    """Return the digest of all runs, 0-d int64, without waiting for a device. None: there are none."""
    digests, factors = [], []
    for name, values, first, stride in runs:
        # The values may be part of a mapped file, whose disk may fail.
        populate(values)
        digests.append(ops.digest(values, first, stride))
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


def whole_digests(numbers: np.ndarray, shards: np.ndarray) -> np.ndarray:
    """Return the digest of each whole state.

    Args:
        numbers: uint64, of shape (ranks, states): that of each rank's shard.
        shards: Of the same shape: which shard of the state that is. Ranks with copies have the same number.

    Returns:
        uint64, of shape (states,).
    """
    firsts = [np.unique(of_state, return_index=True)[1] for of_state in shards.T]
    return np.array([numbers[ranks, i].sum(dtype=np.uint64) for i, ranks in enumerate(firsts)], np.uint64)


class Difference(NamedTuple):
    """Ranks whose copy of a shard is not that of the others.

    Attributes:
        state: The index of the state.
        ranks: The ranks that differ from most; all with a copy, where no value has more of them than another.
    """

    state: int
    ranks: tuple[int, ...]


def differences(numbers: np.ndarray, shards: np.ndarray) -> list[Difference]:
    """Return where ranks that hold copies of one shard have different numbers.

    Args:
        numbers, shards: As for ``whole_digests``.
    """
    found, columns_of = [], dict[bytes, list[int]]()
    for column in range(shards.shape[1]):
        columns_of.setdefault(shards[:, column].tobytes(), []).append(column)
    for columns in columns_of.values():
        of_ranks = shards[:, columns[0]]
        for shard in np.unique(of_ranks):
            ranks = np.flatnonzero(of_ranks == shard).tolist()
            copies = numbers[np.ix_(ranks, columns)]
            for i in np.flatnonzero((copies != copies[0]).any(axis=0)):
                found.append(_difference(columns[i], ranks, copies[:, i].tolist()))
    return sorted(found)


def _difference(state: int, ranks: Sequence[int], values: Sequence[int]) -> Difference:
    (right, most), (_, second), *_ = Counter(values).most_common()
    # A tie does not say who is right.
    is_tie = second == most
    return Difference(state, tuple(r for r, value in zip(ranks, values, strict=True) if is_tie or value != right))
