"""How many bytes of symmetric memory training needs at one time.

See the note in ``comm/transports/nccl_memory_pool.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zeroengine.comm.interfaces import ChannelName, Transport
from zeroengine.comm.transports.nccl_memory_pool import LEAST_SYMMETRIC
from zeroengine.config import Config
from zeroengine.offload.placement import Placement, can_offload_gradients
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.layout import FlatLayout, round_up
from zeroengine.runtime.buckets import slot_numel

ROUNDING = 512  # bytes, of torch's allocator
SLACK = 16 * LEAST_SYMMETRIC  # holes that are too small for anything


@dataclass(frozen=True)
class Expected:
    """What decides the memory of one unit on its way.

    Attributes:
        stored: whether its shard lives elsewhere than on the device.
        kept_here: whether its gradients are kept on the device.
        kept_dtype, reduce_dtype: of its gradients. See ``UnitGradients``.
    """

    layout: FlatLayout
    dtype: torch.dtype
    trainable: bool
    stored: bool
    kept_here: bool
    kept_dtype: torch.dtype
    reduce_dtype: torch.dtype

    @property
    def transient(self) -> bool:
        return self.layout.degrees.parameters > 1 or self.stored

    @property
    def whole(self) -> bool:
        return self.layout.degrees.gradients == 1 and self.kept_here

    @property
    def in_slots(self) -> bool:
        return not self.whole or self.kept_dtype is not self.reduce_dtype


def expected(
    plans: Sequence[UnitPlan], degrees: Sequence[Degrees], placement: Placement, config: Config, transport: Transport
) -> list[Expected]:
    """Of each unit, before it is built."""
    found, stores = [], iter(placement.optimizer)
    for plan, its, stored in zip(plans, degrees, placement.parameters, strict=True):
        store = next(stores) if plan.trainable else None
        kept_here = store is None or not can_offload_gradients(its, transport)
        shapes = ((name, tuple(param.shape)) for name, param in plan.params)
        layout = FlatLayout.build(plan.name, shapes, its, transport.world_size, transport.shard_align(plan.dtype))
        kept = config.accumulation_dtype(plan.dtype)
        reduced = config.reduce_dtype(plan.dtype) or (kept if its.gradients == 1 and kept_here else plan.dtype)
        found.append(Expected(layout, plan.dtype, plan.trainable, stored is not None, kept_here, kept, reduced))
    return found


def needed(units: Sequence[Expected], prefetch_numel: int, bucket_numel: int | None) -> dict[ChannelName, int]:
    """Bytes for each channel.

    Args:
        prefetch_numel: elements that may be gathered ahead of use.
        bucket_numel: elements that one bucket may hold; None: one unit each.
    """
    reduced = [unit for unit in units if unit.trainable]
    return {
        "gather": SLACK + sum(_gathered(units, prefetch_numel)),
        "reduce": SLACK + sum(_kept(reduced)) + sum(_buckets(reduced, bucket_numel)),
    }


def _bytes(numel: int, dtype: torch.dtype) -> int:
    return max(round_up(numel * dtype.itemsize, ROUNDING), LEAST_SYMMETRIC)


def _gathered(units: Sequence[Expected], prefetch_numel: int) -> Iterator[int]:
    """Shards and buffers that stay, and buffers that come and go: one in use, its neighbours, and those ahead."""
    for unit in units:
        if not unit.stored:
            yield _bytes(unit.layout.shard_numel(unit.layout.degrees.parameters), unit.dtype)
    full = [_bytes(unit.layout.numel, unit.dtype) for unit in units if unit.transient]
    sent = [
        _bytes(unit.layout.shard_numel(unit.layout.degrees.parameters), unit.dtype) for unit in units if unit.stored
    ]
    ahead = prefetch_numel * max((unit.dtype.itemsize for unit in units if unit.transient), default=0)
    for several in (full, sent):
        yield min(sum(several), 4 * max(several, default=0) + ahead)


def _kept(units: Sequence[Expected]) -> Iterator[int]:
    """Gradients that are kept as they are moved."""
    for unit in units:
        if unit.kept_here and unit.kept_dtype is unit.reduce_dtype:
            yield _bytes(unit.layout.shard_numel(unit.layout.degrees.gradients), unit.kept_dtype)


def slots_needed(units: Sequence[Expected], bucket_numel: int | None) -> dict[tuple[int, torch.dtype], int]:
    """How many slots of which size and dtype.

    As many as fill one bucket, one on its way, and one for a unit whose gradients come at both ends of a backward.
    """
    units = [unit for unit in units if unit.trainable]
    largest = max((unit.layout.numel for unit in units), default=0)
    together: Counter[tuple[int, torch.dtype]] = Counter()
    every: Counter[tuple[int, torch.dtype]] = Counter()
    bucket: list[tuple[int, torch.dtype]] = []
    numel = 0
    for unit in reversed(units):
        if numel + unit.layout.numel > (bucket_numel or 0):
            bucket, numel = [], 0
        numel += unit.layout.numel
        if unit.in_slots:
            key = slot_numel(unit.layout.numel, largest), unit.reduce_dtype
            bucket.append(key)
            every[key] += 1
            together[key] = max(together[key], bucket.count(key))
    return {key: min(together[key] + 2, every[key] + 1) for key in every}


def _buckets(units: Sequence[Expected], bucket_numel: int | None) -> Iterator[int]:
    """Slots, and for each what its sum may be received into."""
    shares = min((unit.layout.degrees.optimizer for unit in units), default=1)
    for (numel, dtype), count in slots_needed(units, bucket_numel).items():
        yield count * _bytes(numel, dtype)
        if shares > 1:
            yield count * _bytes(numel // shares, dtype)
