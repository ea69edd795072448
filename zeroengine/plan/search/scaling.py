"""Scale what was traced: to another micro-batch size, and to another number of blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from zeroengine.partition.cut import UnitPlan
from zeroengine.plan.bytes.activations import MicroStep, OperationCount
from zeroengine.plan.bytes.state_bytes import StateBytes


def extrapolated(small: MicroStep, large: MicroStep, size: int) -> MicroStep:
    """Return the micro-step of `size` samples on the line through two traced ones.

    Bytes and FLOPs are linear in the number of samples: each activation has a batch dimension or does not.
    """

    factor = size / large.micro_batch

    def line(low: int, high: int) -> int:
        return low + (high - low) * (size - small.micro_batch) // (large.micro_batch - small.micro_batch)

    return replace(
        large,
        micro_batch=size,
        saved_bytes=line(small.saved_bytes, large.saved_bytes),
        peak_bytes=line(small.peak_bytes, large.peak_bytes),
        forward_flops=line(small.forward_flops, large.forward_flops),
        backward_flops=line(small.backward_flops, large.backward_flops),
        forward=_extrapolated_operations(small.forward, large.forward, factor, line),
        backward=_extrapolated_operations(small.backward, large.backward, factor, line),
        unit_flops={name: line(small.unit_flops.get(name, 0), flops) for name, flops in large.unit_flops.items()},
    )


def _extrapolated_operations(
    small: Sequence[OperationCount], large: Sequence[OperationCount], factor: float, line: Callable[[int, int], int]
) -> list[OperationCount]:
    """Return operations of another micro-batch: on a line where both traces have the same ones, else in proportion."""
    if [(op.dtype, op.count) for op in small] == [(op.dtype, op.count) for op in large]:
        pairs = zip(small, large, strict=True)
        return [
            replace(
                b,
                flops=line(a.flops, b.flops),
                nbytes=line(a.nbytes, b.nbytes),
                new_bytes=line(a.new_bytes, b.new_bytes),
            )
            for a, b in pairs
        ]
    return [
        replace(op, flops=int(op.flops * factor), nbytes=int(op.nbytes * factor), new_bytes=int(op.new_bytes * factor))
        for op in large
    ]


def repeated_units(plans: Sequence[UnitPlan]) -> tuple[list[UnitPlan], list[UnitPlan], int]:
    """Return the units of the model's repeated blocks, those of the last block, and the number of blocks.

    The repeated blocks are the units whose names differ in a number alone. Of several kinds, such as those of an
    encoder and a decoder, all count that are as many as the largest kind.
    """
    names = [plan.name.partition(" (")[0] for plan in plans]
    last_names = {_pattern(name): name for name in names}
    counts = Counter(_pattern(name) for name in dict.fromkeys(names))
    numel: Counter[str] = Counter()
    for name, plan in zip(names, plans, strict=True):
        numel[_pattern(name)] += plan.numel if counts[_pattern(name)] > 1 else 0
    if not any(numel.values()):
        return [], [], 0
    count = counts[numel.most_common(1)[0][0]]
    blocks = [(name, plan) for name, plan in zip(names, plans, strict=True) if counts[_pattern(name)] == count]
    last = [plan for name, plan in blocks if last_names[_pattern(name)] == name]
    return [plan for _, plan in blocks], last, count


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def with_blocks(micro: MicroStep, block_names: set[str], before: int, after: int) -> MicroStep:
    """Return the micro-step of the model with `after` instead of `before` blocks.

    The blocks' share of activations is taken to be their share of FLOPs.
    """
    total = sum(micro.unit_flops.values())
    share = sum(flops for name, flops in micro.unit_flops.items() if name in block_names) / total if total else 1.0
    more_bytes = int(micro.saved_bytes * share * (after - before) / before)
    factor = 1 + share * (after - before) / before
    return replace(
        micro,
        saved_bytes=micro.saved_bytes + more_bytes,
        peak_bytes=micro.peak_bytes + more_bytes,
        forward_flops=int(micro.forward_flops * factor),
        backward_flops=int(micro.backward_flops * factor),
    )


def states_with_blocks(states: StateBytes, minus_one: StateBytes, more: int) -> StateBytes:
    """Return the states of a model with more, or fewer, blocks than that of `states`.

    Args:
        states: The states of the model.
        minus_one: Those of the model with one block less.
        more: The number of blocks to add; negative: to remove.
    """

    def line(name: str) -> Any:
        high, low = getattr(states, name), getattr(minus_one, name)
        if isinstance(high, Mapping):
            return {key: high[key] + (high[key] - low[key]) * more for key in high}
        return high + (high - low) * more

    return replace(states, **{field.name: line(field.name) for field in fields(states)})


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 1 to `limit` for which `fits` holds, or 0 if it does not hold for 1.

    Args:
        fits: Where it fails for a number, it fails for all larger ones.
        limit: The largest number that is tried.
    """
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested keys with others put into them: `changes` win, and keys beside them stay."""
    result = dict(tree)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result
