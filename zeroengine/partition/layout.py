"""Where each element of each parameter lies in a unit's flat buffer, and who owns it. Integers only.

A unit of three parameters on two ranks (PARAM_ALIGN 4 and SHARD_ALIGN 8 for the picture; ``.`` is padding):

    flat buffer   a a a a a a a . b b b b b b . . | c c c c c c . . . . . . . . . .
    offset        0               8               | 16                            32
    owner         rank 0                          | rank 1

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

PARAM_ALIGN = 32  # a parameter starts on a cache line and at a vector load, in fp32 and in bf16
SHARD_ALIGN = 64  # so does a shard, and no two ranks write to one cache line


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParamSlot:
    """One whole parameter in the flat buffer."""

    name: str  # fully qualified parameter name
    shape: tuple[int, ...]
    offset: int  # first element within the flat buffer

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The first element after the parameter within the flat buffer."""
        return self.offset + self.numel


@dataclass(frozen=True)
class ShardSpan:
    """The elements of one parameter that one rank owns. Empty spans are never built."""

    param_index: int  # index of the parameter within the layout
    param_offset: int  # first owned element within the flattened parameter
    shard_offset: int  # where it lies within the rank's shard
    numel: int

    @property
    def shard_slice(self) -> slice:
        """The span's elements as a slice of the rank's shard."""
        return slice(self.shard_offset, self.shard_offset + self.numel)


@dataclass(frozen=True)
class FlatLayout:
    """The flat buffer of one unit, for every rank and degree."""

    name: str
    slots: tuple[ParamSlot, ...]
    numel: int  # of the flat buffer, padding included; divisible into equal aligned shards
    degrees: Degrees

    @classmethod
    def build(
        cls,
        name: str,
        params: Iterable[tuple[str, tuple[int, ...]]],
        degrees: Degrees,
        world_size: int,
        align: int = SHARD_ALIGN,
    ) -> FlatLayout:
        """Lays ``params`` (name, shape) out in order; the buffer divides by ``world_size`` at every stage.

        Padding to the world size and not to the degree keeps offsets, and so rounding, the same at
        every stage. A shard is a multiple of ``align`` and of ``SHARD_ALIGN``.

        Raises:
            ZeroEngineError: the optimizer's degree does not divide ``world_size``.
        """
        if world_size % degrees.optimizer:
            raise ZeroEngineError(f"the optimizer's degree must divide the {world_size} ranks: {degrees}")
        slots, end = [], 0
        for param_name, shape in params:
            slot = ParamSlot(param_name, tuple(shape), round_up(end, PARAM_ALIGN))
            slots.append(slot)
            end = slot.end
        return cls(name, tuple(slots), round_up(max(end, 1), math.lcm(SHARD_ALIGN, align) * world_size), degrees)

    @property
    def param_numel(self) -> int:
        """Elements of the parameters themselves, without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def _offsets(self) -> list[int]:
        return [slot.offset for slot in self.slots]

    def param_index_at(self, offset: int) -> int:
        """Return the number of the slot that holds the element at ``offset`` of the flat buffer."""
        return bisect_right(self._offsets, offset) - 1

    def shard_numel(self, degree: int) -> int:
        """Return the number of elements, padding included, of a shard of a state of ``degree``."""
        return self.numel // degree

    def shard_range(self, rank: int, degree: int) -> tuple[int, int]:
        """Return the half-open range of the flat buffer that ``rank`` owns of a state of ``degree``."""
        size = self.shard_numel(degree)
        start = self.degrees.index(rank, degree) * size
        return start, start + size

    def unreplicated_range(self, rank: int, degree: int, world_size: int) -> tuple[int, int]:
        """The part of ``rank``'s shard that it stands for where every element counts once over all ranks.

        Ranks that hold the same shard split it evenly.
        """
        start, stop = self.shard_range(rank, degree)
        size = (stop - start) * degree // world_size
        return start + rank // degree * size, start + (rank // degree + 1) * size

    def spans(self, rank: int, degree: int, within: tuple[int, int] | None = None) -> Iterator[ShardSpan]:
        """The pieces of parameters in ``rank``'s shard of a state of ``degree``, in buffer order.

        Args:
            within: a part of the shard's range, to give only the pieces in there.
        """
        base, _ = self.shard_range(rank, degree)
        start, end = within or self.shard_range(rank, degree)
        for i, slot in enumerate(self.slots):
            low, high = max(slot.offset, start), min(slot.end, end)
            if low < high:
                yield ShardSpan(i, low - slot.offset, low - base, high - low)
