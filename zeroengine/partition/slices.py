"""Parameters of which each rank holds a slice, because the model's library has split them.

Tensor parallelism splits a matrix over the ranks of a *model group*, which compute one sample together. Such a
parameter is a ``DTensor`` over the group's mesh, or a plain tensor of the slice's shape whose module does its own
collectives, where an ``mpu`` says which ranks they are. The ranks that hold the same slice, one of each model group,
are its *data group*: ZeRO partitions the slice over them, as it partitions a whole parameter over all ranks. With 4
ranks in model groups of 2:

    rank            0     1     2     3
    model group     0     0     1     1
    slice           a     b     a     b       data groups: ranks 0 and 2, ranks 1 and 3

Experts are split over ranks that compute other samples, and exchange tokens (expert parallelism). Their data groups
are other ones: with experts over 4 of 8 ranks, each expert is on two ranks, while all 8 have what is not split.

Three facts of a slice are all that the rest asks: the shape of the whole parameter, the part of it that this rank has,
and the data group. A parameter that is not split has equal values and gradients on all ranks of a model group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.boxes import Box, pieces_of_run

# The attribute of a parameter of an engine that holds its ``Slice``.
SLICE_ATTRIBUTE = "_zeroengine_slice"


class SliceRun(NamedTuple):
    """Elements of one dimension that lie next to each other in the whole parameter, and in the slice.

    Attributes:
        start: The first of them in the whole parameter.
        local_start: The first of them in the slice.
        size: Their number.
    """

    start: int
    local_start: int
    size: int


class Slice(NamedTuple):
    """The part of a parameter that this rank has.

    Attributes:
        shape: The shape of the whole parameter.
        local_shape: That of the slice.
        dim: The dimension that is split; None: the slice is the whole parameter.
        runs: What the slice has of this dimension, in order: one run, or several where a fused matrix is split in each
            of its parts.
        expert_ranks: Of experts, which are split over ranks that compute other samples: the number of ranks that have
            the same slice. 0: the ranks of a model group compute one sample together.
        number: The number of this slice.
        num_ranks: The number of slices.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dim: int | None = None
    runs: tuple[SliceRun, ...] = ()
    expert_ranks: int = 0
    number: int = 0
    num_ranks: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether every rank of a model group has the whole parameter."""
        return self.dim is None

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of what the slice is of a tensor of the parameter's shape."""
        if self.dim is None:
            return whole
        return torch.cat([whole.narrow(self.dim, run.start, run.size) for run in self.runs], self.dim)

    def numel_before(self, offset: int) -> int:
        """Return how many elements of the slice lie before an element of the flattened whole parameter.

        They have one order in both, so elements next to each other in the whole parameter are a run of the slice.
        """
        if self.dim is None:
            return offset
        inner = math.prod(self.shape[self.dim + 1 :])
        outer, rest = divmod(offset, self.shape[self.dim] * inner)
        before = sum(min(max(rest - run.start * inner, 0), run.size * inner) for run in self.runs)
        return outer * self.local_shape[self.dim] * inner + before

    def boxes(self, box: Box) -> Iterator[tuple[Box, tuple[slice, ...]]]:
        """Yield the boxes of the whole parameter that a box of the slice is, each with its place in that box."""
        if self.dim is None:
            yield box, tuple(slice(0, size) for size in box.sizes)
            return
        dim = self.dim
        for run in self.runs:
            first = max(box.offsets[dim], run.local_start)
            last = min(box.offsets[dim] + box.sizes[dim], run.local_start + run.size)
            if first < last:
                offsets = (*box.offsets[:dim], run.start + first - run.local_start, *box.offsets[dim + 1 :])
                sizes = (*box.sizes[:dim], last - first, *box.sizes[dim + 1 :])
                place = [slice(0, size) for size in box.sizes]
                place[dim] = slice(first - box.offsets[dim], last - box.offsets[dim])
                yield Box.within(self.shape, offsets, sizes), tuple(place)


def slice_of(param: torch.Tensor) -> Slice | None:
    """Return the slice of ``param``, if a model that an engine owns is split at it; else None."""
    part: Slice | None = param.__dict__.get(SLICE_ATTRIBUTE)
    return part


def is_split(param: torch.Tensor) -> bool:
    """Return whether each rank of a model group has another part of ``param``."""
    part = slice_of(param)
    return part is not None and not part.is_whole


def expert_ranks(param: torch.Tensor) -> int:
    """Return ``Slice.expert_ranks`` of ``param``; 0 if it is not split."""
    part = slice_of(param)
    return 0 if part is None or part.is_whole else part.expert_ranks


def whole_shape(param: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter, of which this rank may have a slice."""
    part = slice_of(param)
    return tuple(param.shape) if part is None else part.shape


def local_shape(param: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of what this rank has of ``param``."""
    part = slice_of(param)
    return tuple(param.shape) if part is None else part.local_shape


def local_numel(param: torch.Tensor) -> int:
    """Return the number of elements that this rank has of ``param``."""
    return math.prod(local_shape(param))


def pieces_of_slice(param: torch.Tensor, start: int, values: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of the whole parameter that a run of the flattened slice is, each with its values.

    Args:
        param: The parameter, which may not be split.
        start: The first element of the run in what this rank has of the parameter.
        values: The values of the run, 1-D.
    """
    pieces, part = pieces_of_run(local_shape(param), start, values), slice_of(param)
    if part is None:
        return pieces
    return [(box, piece[place]) for local, piece in pieces for box, place in part.boxes(local)]


def make_slice(name: str, param: Any, number: int, expert_ranks: int = 0) -> Slice:
    """Return what one rank of a mesh has of a ``DTensor``.

    Args:
        name: The name of the parameter, for errors.
        param: The ``DTensor``, over a mesh of one dimension.
        number: The rank's number in the mesh.
        expert_ranks: See ``Slice``.

    Raises:
        ZeroEngineError: It has another placement than ``Shard`` and ``Replicate``.
    """
    (placement,) = param.placements
    shape = tuple(param.shape)
    if placement.is_replicate():
        return Slice(shape, shape)
    # Such as ``Partial``, whose values are terms of a sum.
    if not hasattr(placement, "dim"):
        raise ZeroEngineError(
            f"parameter {name} is a DTensor with the placement {placement}: only Shard and Replicate are parts of a "
            "parameter. Redistribute it before initialize()."
        )
    dim, num_parts = placement.dim % len(shape), getattr(placement, "split_factor", 1)
    if shape[dim] % num_parts:
        raise ZeroEngineError(
            f"parameter {name} is a DTensor with the placement {placement}, whose {num_parts} parts do not divide "
            f"its {shape[dim]} elements: split it by Shard({dim})"
        )
    return _cut(shape, dim, num_parts, number, param.device_mesh.size(), expert_ranks)


def slice_of_plain_tensor(
    name: str, shape: tuple[int, ...], dim: int, num_parts: int, number: int, num_ranks: int
) -> Slice:
    """Return what a plain tensor is of the parameter that the ranks of a model group have together.

    Args:
        name: The name of the parameter, for errors.
        shape: That of the tensor. It is the same on all ranks.
        dim: The dimension that is split; negative ones count from the last.
        num_parts: The number of equal parts of this dimension, each of which is split over the ranks, as of a fused
            matrix. 1: it is split as one.
        number: The rank's number in its group.
        num_ranks: The number of the group's ranks.

    Raises:
        ZeroEngineError: There is no such dimension, or it has no such parts.
    """
    if not -len(shape) <= dim < len(shape) or num_parts < 1 or shape[dim] % num_parts:
        raise ZeroEngineError(
            f"parameter {name} of shape {shape} is no slice along dimension {dim} of {num_parts} equal parts: write a "
            f"dimension from 0 to {len(shape) - 1}, and a number of parts that divides it"
        )
    dim %= len(shape)
    full_shape = (*shape[:dim], shape[dim] * num_ranks, *shape[dim + 1 :])
    return _cut(full_shape, dim, num_parts, number, num_ranks)


def slices_of_ranks(param: Any) -> tuple[tuple[Slice, ...], int]:
    """Return what each of the ranks that hold ``param`` together has of it, ascending, and this rank's place there."""
    part = slice_of(param)
    if part is None or part.dim is None:
        return (Slice(tuple(param.shape), tuple(param.shape)),), 0
    mesh = getattr(param, "device_mesh", None)
    # A mesh may have its ranks, and so the slices, in another order.
    ranks = range(part.num_ranks) if mesh is None else mesh.mesh.tolist()
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    cuts = [_cut(part.shape, part.dim, len(part.runs), n, part.num_ranks, part.expert_ranks) for n in order]
    return tuple(cuts), order.index(part.number)


def _cut(shape: tuple[int, ...], dim: int, num_parts: int, number: int, num_ranks: int, expert_ranks: int = 0) -> Slice:
    """Return one of the slices of a parameter of ``shape``, of which a dimension has equal parts that are split."""
    # Of a fused matrix, such as those of queries, keys and values one above another, each part is split.
    runs = _runs(shape[dim], num_ranks, number, num_parts)
    sizes = (*shape[:dim], sum(run.size for run in runs), *shape[dim + 1 :])
    return Slice(shape, sizes, dim, runs, expert_ranks, number, num_ranks)


def _runs(size: int, num_ranks: int, number: int, num_parts: int) -> tuple[SliceRun, ...]:
    """Return what the rank has of a dimension that is cut into equal parts, each of which is split over the ranks."""
    runs: list[SliceRun] = []
    local_start, part = 0, size // num_parts
    for index in range(num_parts):
        # Torch gives each rank the same number of elements, and the last ones what remains.
        chunk = -(-part // num_ranks)
        first, last = min(number * chunk, part), min((number + 1) * chunk, part)
        runs.append(SliceRun(index * part + first, local_start, last - first))
        local_start += last - first
    return tuple(runs)


class ModelLayout(NamedTuple):
    """Which ranks hold the slices of one model together, and which hold the same slice. Ranks are those of the engine.

    Attributes:
        model_group: The ranks that hold one model together, in the order of their slices, this rank among them.
        data_group: The ranks that hold the same slices as this rank, ascending.
    """

    model_group: tuple[int, ...]
    data_group: tuple[int, ...]

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[int]], rank: int) -> ModelLayout:
        """Return the layout, in the view of one rank, of model groups that cover all ranks."""
        own = next(group for group in groups if rank in group)
        number = own.index(rank)
        return cls(tuple(own), tuple(sorted(group[number] for group in groups)))

    @property
    def number(self) -> int:
        """The number of this rank's slices."""
        return next(i for i, rank in enumerate(self.model_group) if rank in self.data_group)
