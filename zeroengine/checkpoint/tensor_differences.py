"""Compare the tensors of two checkpoints, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroengine.checkpoint.dcp_load import load_files
from zeroengine.checkpoint.dcp_metadata import DcpMetadata, read_metadata
from zeroengine.checkpoint.entries import StateEntry
from zeroengine.checkpoint.inspect import list_tensors
from zeroengine.partition.boxes import Box
from zeroengine.utils.formats import listed
from zeroengine.utils.progress import Report, progress

# Differences are computed in fp64 for so many elements at once.
CHUNK = 1 << 20
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_NAMES = 3


@dataclass
class TensorDifference:
    """The difference of one tensor between two checkpoints.

    Attributes:
        name: Its name in both.
        elements: Its number of elements.
        differing: How many of them differ in their bits, or in value where dtypes differ.
        absolute: The largest difference; infinite where one of the two is not finite.
        relative: The largest difference over the larger of both values.
        ulps: The difference of the elements that differ most, in units of the last place. 0 unless both have one
            floating-point dtype.
    """

    name: str
    elements: int = 0
    differing: int = 0
    absolute: float = 0.0
    relative: float = 0.0
    ulps: int = 0

    def add(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Add a piece: the same elements of both tensors, 1-D."""
        self.elements += first.numel()
        is_same_dtype = first.dtype == second.dtype
        for a, b in zip(first.split(CHUNK), second.split(CHUNK), strict=True):
            words = [x.view(BITS[x.element_size()]) if is_same_dtype else x.double() for x in (a, b)]
            differs = words[0] != words[1]
            if not differs.any():
                continue
            x, y = a[differs].double(), b[differs].double()
            gaps = (x - y).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
            # Zeros of two signs differ in their bits alone: 0 / 0. Infinity over infinity is no number, either.
            relative = torch.where(gaps == 0, 0.0, gaps / torch.maximum(x.abs(), y.abs())).nan_to_num(nan=torch.inf)
            self.differing += len(gaps)
            self.relative = max(self.relative, float(relative.max()))
            if float(gaps.max()) >= self.absolute:
                self.absolute = float(gaps.max())
                if is_same_dtype and a.is_floating_point():
                    largest = int(gaps.argmax())
                    self.ulps = _ulps([int(word[differs][largest]) for word in words], a.element_size())


def _ulps(words: Sequence[int], size: int) -> int:
    """Return the distance of two floating-point numbers of `size` bytes, given by their bits as signed integers."""
    a, b = (word if word >= 0 else -(word + (1 << (8 * size - 1))) for word in words)
    return abs(a - b)


def compare_checkpoints(paths: Sequence[Path]) -> tuple[list[TensorDifference], list[str]]:
    """Return the tensors of two checkpoints that both have, and sentences about the others.

    A piece of a tensor as the first one stores it, and what overlaps with it in the second, are in memory at a time.

    Args:
        paths: The directories of the checkpoints.

    Raises:
        CheckpointError: A checkpoint cannot be read.
    """
    contents = [read_metadata(path) for path in paths]
    a, b = ({tensor.name: tensor for tensor in list_tensors(path)} for path in paths)
    alone = [(path, sorted(own)) for path, own in zip(paths, (a.keys() - b.keys(), b.keys() - a.keys()), strict=True)]
    sentences = [f"Only {path} has {listed(names, MAX_NAMES)}." for path, names in alone if names]
    common = sorted(a.keys() & b.keys())
    reshaped = [name for name in common if a[name].shape != b[name].shape]
    sentences += [f"{name} has the shapes {a[name].shape} and {b[name].shape}." for name in reshaped]
    compared = [TensorDifference(name) for name in common if name not in reshaped]
    with progress("comparing", sum(a[tensor.name].nbytes + b[tensor.name].nbytes for tensor in compared)) as report:
        for tensor in compared:
            for first, second in _pieces(tensor.name, paths, contents, report):
                tensor.add(first, second)
    return compared, sentences


def _pieces(
    name: str, paths: Sequence[Path], contents: Sequence[DcpMetadata], report: Report
) -> Iterator[list[torch.Tensor]]:
    """Yield the values of both checkpoints, 1-D, for each piece that the first one stores."""
    for piece in contents[0].tensors[name].pieces:
        values = []
        for path, content in zip(paths, contents, strict=True):
            stored = content.tensors[name]
            dtype: torch.dtype = getattr(torch, stored.dtype)
            tensor = torch.empty(piece.sizes, dtype=dtype)
            entry = StateEntry(stored.shape, dtype, [(Box(piece.offsets, piece.sizes, 0), tensor)])
            load_files(path, content, {name: entry}, (), report)
            values.append((torch.view_as_real(tensor) if dtype.is_complex else tensor).reshape(-1))
        yield values
