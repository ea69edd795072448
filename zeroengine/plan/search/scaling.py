"""Scale what was traced to another micro-batch size, search the largest one, and merge keys of configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zeroengine.plan.trace.activations import MicroStep, OperationCount


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
        exchanged_bytes=line(small.exchanged_bytes, large.exchanged_bytes),
        host_bytes=line(small.host_bytes, large.host_bytes),
        summed_bytes=line(small.summed_bytes, large.summed_bytes),
        forward=_extrapolated_operations(small.forward, large.forward, factor, line),
        backward=_extrapolated_operations(small.backward, large.backward, factor, line),
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
