"""Where each element of each parameter lies in a unit's flat buffer, and which rank owns it. Integers only.

This is a unit of parameters a (7 elements), b (12) and c (6) on two ranks. In the picture PARAM_ALIGN is 4, SHARD_ALIGN
is 8, and ``.`` is padding:

    offset        0       4       8       12      16      20      24      28      32
    flat buffer   a a a a a a a . b b b b b b b b b b b b c c c c c c . . . . . .
    degree 1      <-------------- every rank owns all 32 elements -------------->
    degree 2      <----------- rank 0 ---------->|<----------- rank 1 ---------->

- Each parameter starts at a multiple of PARAM_ALIGN: ``ParamSlot`` offsets 0, 8 and 20.
- The buffer ends at a multiple of SHARD_ALIGN * world size (16 here), so all ranks' shards are equal and aligned.
- At degree 2 the shard of rank 1 is ``shard_range`` [16, 32) of the buffer. It holds two ``ShardSpan``s:

    param_index   param_offset   shard_offset   numel
    1 (b)         8              0              4
    2 (c)         0              4              6

All offsets and sizes count elements, not bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.degrees import Degrees
from zeroengine.utils.formats import round_up

# Counted in elements. In fp32 and in bf16, a parameter starts on a cache line, aligned for vector loads.
PARAM_ALIGN = 32
# Counted in elements. A shard also starts on a cache line, so that no two ranks write to one line.
SHARD_ALIGN = 64


@dataclass(frozen=True)
class ParamSlot:
    """One parameter in the flat buffer."""

    name: str  # fully qualified parameter name
    shape: tuple[int, ...]
    offset: int  # first element within the flat buffer

    @cached_property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The offset after the last element."""
        return self.offset + self.numel


@dataclass(frozen=True)
class ShardSpan:
    """The elements of one parameter that one rank owns. Empty spans are never built."""

    param_index: int  # index of the parameter within the layout
    param_offset: int  # first owned element within the flattened parameter
    shard_offset: int  # first element within the rank's shard
    numel: int

    @property
    def shard_slice(self) -> slice:
        """The span's elements as a slice of the rank's shard."""
        return slice(self.shard_offset, self.shard_offset + self.numel)

    @property
    def param_slice(self) -> slice:
        """The span's elements as a slice of the flattened parameter."""
        return slice(self.param_offset, self.param_offset + self.numel)


@dataclass(frozen=True)
class FlatLayout:
    """The flat buffer of one unit: where parameters lie, and which part each rank owns at each degree."""

    name: str
    slots: tuple[ParamSlot, ...]
    numel: int  # of the flat buffer, padding included
    degrees: Degrees

    @classmethod
    def build(
        cls,
        name: str,
        params: Iterable[tuple[str, tuple[int, ...]]],
        degrees: Degrees,
        world_size: int,
        align: int = SHARD_ALIGN,
        param_align: int = 1,
    ) -> FlatLayout:
        """Lay parameters out in order.

        The buffer is padded for ``world_size`` shards at all degrees. So offsets, and the order of rounding, are the
        same at every stage.

        Args:
            params: Name and shape of each parameter.
            align: Counted in elements. The size of every shard is a multiple of this and of ``SHARD_ALIGN``.
            param_align: Counted in elements. Each parameter starts at a multiple of this and of ``PARAM_ALIGN``.

        Raises:
            ZeroEngineError: The optimizer's degree does not divide ``world_size``.
        """
        if world_size % degrees.optimizer:
            raise ZeroEngineError(f"the optimizer's degree must divide the {world_size} ranks: {degrees}")
        slots, end = [], 0
        for param_name, shape in params:
            slot = ParamSlot(param_name, tuple(shape), round_up(end, math.lcm(PARAM_ALIGN, param_align)))
            slots.append(slot)
            end = slot.end
        # A unit of empty parameters still has a buffer, because some collectives refuse empty tensors.
        return cls(name, tuple(slots), round_up(max(end, 1), math.lcm(SHARD_ALIGN, align) * world_size), degrees)

    @cached_property
    def _offsets(self) -> list[int]:
        return [slot.offset for slot in self.slots]

    def param_index_at(self, offset: int) -> int:
        """Return the index of the parameter that holds the element at ``offset`` of the flat buffer."""
        return bisect_right(self._offsets, offset) - 1

    def shard_numel(self, degree: int) -> int:
        """Return the elements of one rank's shard at ``degree``."""
        return self.numel // degree

    def shard_range(self, rank: int, degree: int) -> tuple[int, int]:
        """Return the range [start, stop) of the flat buffer that ``rank`` owns at ``degree``."""
        size = self.shard_numel(degree)
        start = self.degrees.index(rank, degree) * size
        return start, start + size

    def unreplicated_range(self, rank: int, degree: int, world_size: int) -> tuple[int, int]:
        """Return a range of ``rank``'s shard such that the ranges of all ranks tile the flat buffer.

        Ranks that hold the same shard split it evenly. A sum over these ranges counts every element once.
        """
        # The parts are numbered by all levels, so a rank's part of every unit has the same number, whatever the unit's
        # degree. It lies inside the rank's shard, because the numbers of parts refine those of shards.
        size = self.numel // world_size
        start = self.degrees.piece(rank, world_size) * size
        return start, start + size

    def spans(self, rank: int, degree: int, within: tuple[int, int] | None = None) -> Iterator[ShardSpan]:
        """Yield the part of each parameter that lies in ``rank``'s shard at ``degree``, in buffer order.

        Args:
            within: A range of the flat buffer inside the shard. Spans are clipped to it.
        """
        base, _ = self.shard_range(rank, degree)
        start, end = within or self.shard_range(rank, degree)
        for i, slot in enumerate(self.slots):
            # A parameter may lie entirely outside the range.
            low, high = max(slot.offset, start), min(slot.end, end)
            if low < high:
                yield ShardSpan(i, low - slot.offset, low - base, high - low)
