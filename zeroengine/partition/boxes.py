"""Cover a run of a flattened tensor by boxes of the tensor itself, the form in which checkpoints store shards.

A run of a 3 x 4 tensor, elements 2 to 10 of 12, is three boxes (``.`` is not in the run):

    . . a a        a: rows 0:1, columns 2:4
    b b b b        b: rows 1:2, columns 0:4
    c c . .        c: rows 2:3, columns 0:2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Box:
    """``tensor[offsets[0] : offsets[0] + sizes[0], ...]``.

    Its elements are contiguous in the flattened tensor (``is_run``), unless it is of a slice of the tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # offset of its first element within the flattened tensor

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape), 0)

    @classmethod
    def within(cls, shape: Sequence[int], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
        """Return the box at ``offsets`` of a tensor of ``shape``."""
        strides = (math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return cls(offsets, sizes, sum(offset * stride for offset, stride in zip(offsets, strides, strict=True)))

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return math.prod(self.sizes)

    def stop(self, shape: Sequence[int]) -> int:
        """Return the offset behind its last element within the flattened tensor, which has ``shape``."""
        last = tuple(offset + size - 1 for offset, size in zip(self.offsets, self.sizes, strict=True))
        return Box.within(shape, last, self.sizes).start + 1

    def is_run(self, shape: Sequence[int]) -> bool:
        """Return whether its elements are contiguous in the flattened tensor, which has ``shape``."""
        # Behind the first dimension with several elements, it has all of them.
        cut = next((dim for dim, size in enumerate(self.sizes) if size > 1), len(self.sizes))
        return self.sizes[cut + 1 :] == tuple(shape[cut + 1 :])


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the fewest boxes, in order, that cover the elements [start, stop) of a flattened tensor of ``shape``.

    There are at most ``2 * len(shape) - 1``, and none if the run is empty.
    """
    if start >= stop:
        return
    # A tensor without dimensions has one element, and this run contains it.
    if not shape:
        yield Box((), (), 0)
        return
    # The run has elements, so no dimension is 0, and neither is `row`.
    row = math.prod(shape[1:])
    # The rows [first, last) lie entirely in the run. Parts of rows may precede and follow them.
    first, last = -(-start // row), stop // row
    # The run begins and ends within one row, so only the inner dimensions are cut.
    if first > last:
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row)
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def pieces_of_run(shape: tuple[int, ...], first: int, values: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of a run of a flattened tensor, each with its values, views of those of the run (1-D).

    Args:
        shape: The shape of the tensor.
        first: The first element of the run.
        values: The values of the run.
    """
    # DCP stores boxes, and one run may need several.
    boxes = boxes_of_run(shape, first, first + values.numel())
    return [(box, values[box.start - first :][: box.numel].view(box.sizes)) for box in boxes]


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a run that lies in one row."""
    base = index * math.prod(shape[1:])
    for box in boxes_of_run(shape[1:], start - base, stop - base):
        yield Box((index, *box.offsets), (1, *box.sizes), base + box.start)
