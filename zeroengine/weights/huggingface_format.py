"""Sharded safetensors with an index, as Hugging Face writes and loads them, written piece by piece.

    out/
      model-00001-of-00002.safetensors
      model-00002-of-00002.safetensors
      model.safetensors.index.json        which tensor lies in which file

or one ``model.safetensors``. Sizes and places are known before any value, so headers are written first and values
then go to their places in any order, from any process. Nothing is ever held but the piece at hand.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroengine.errors import CheckpointError
from zeroengine.weights.output_folder import INDEX, SINGLE

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
OPEN_FILES = 64  # at a time


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: torch.dtype | None) -> TensorSpec:
        """In another floating dtype, where it is floating."""
        return self if dtype is None or not self.dtype.is_floating_point else TensorSpec(self.shape, dtype)


@dataclass(frozen=True)
class TensorPlacement:
    """Where a tensor's bytes are to lie."""

    file: str
    start: int
    spec: TensorSpec


@dataclass(frozen=True)
class FileLayout:
    """Every file of an export before there is one: the same on all ranks that make it of the same tensors."""

    places: dict[str, TensorPlacement]
    headers: dict[str, bytes]  # of each file
    sizes: dict[str, int]  # of each file, header included
    index: str | None  # None where there is one file

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


def plan(tensors: Mapping[str, TensorSpec], tied: Mapping[str, str], shard_size: int) -> FileLayout:
    """Shares ``tensors`` out to files of at most ``shard_size`` bytes of values, in their names' order.

    A tensor that is larger has a file to itself.

    Args:
        tied: further names, and the names that they stand for; recorded, not written.

    Raises:
        CheckpointError: safetensors has no such dtype.
    """
    for name, spec in tensors.items():
        if spec.dtype not in NAMES:
            raise CheckpointError(f"{name} is {spec.dtype}, which safetensors files cannot hold")
    groups: list[list[str]] = [[]]
    filled = 0
    for name in sorted(tensors, key=_natural):
        nbytes = tensors[name].nbytes
        if groups[-1] and filled + nbytes > shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    count = len(groups)
    files = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    about = {"tied": json.dumps(dict(sorted(tied.items())))} if tied else {}
    places: dict[str, TensorPlacement] = {}
    headers: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for file, names in zip(files, groups, strict=True):
        header: dict[str, object] = {"__metadata__": {"format": "pt", **about}}
        end = 0
        starts = {}
        for name in sorted(names, key=lambda name: -tensors[name].dtype.itemsize):  # so each is aligned to its dtype
            spec, starts[name] = tensors[name], end
            end += spec.nbytes
            header[name] = {
                "dtype": NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [starts[name], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        sizes[file] = len(headers[file]) + end
        places |= {name: TensorPlacement(file, len(headers[file]) + starts[name], tensors[name]) for name in names}
    if count == 1:
        return FileLayout(places, headers, sizes, None)
    total = sum(spec.nbytes for spec in tensors.values())
    weight_map = {name: places[name].file for name in places}
    index = json.dumps({"metadata": {"total_size": total, **about}, "weight_map": weight_map}, indent=2)
    return FileLayout(places, headers, sizes, index + "\n")


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders ``h.2`` before ``h.10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


class SafetensorsWriter:
    """Puts values to their places in the files of ``folder``."""

    def __init__(self, folder: Path, plan: FileLayout) -> None:
        self._folder, self._plan = folder, plan
        self._files: OrderedDict[str, int] = OrderedDict()
        self._touched: set[str] = set()
        self._cast = torch.empty(0, dtype=torch.uint8, device="cpu")  # kept: fresh pages cost more than the cast

    def create(self) -> None:
        """Makes the files, at their full size, with their headers, and the index. Once, before anybody writes."""
        for name, header in self._plan.headers.items():
            with open(self._folder / name, "wb") as file:
                file.write(header)
                file.truncate(self._plan.sizes[name])
            self._touched.add(name)
        if self._plan.index is not None:
            (self._folder / INDEX).write_text(self._plan.index)
            self._touched.add(INDEX)

    def write(self, name: str, offsets: Sequence[int], sizes: Sequence[int], first: int, values: torch.Tensor) -> None:
        """Casts and writes elements of the box at ``offsets`` of ``sizes`` of a tensor.

        Args:
            first: where ``values`` (CPU, 1-D) begin within the flattened box.
        """
        place = self._plan.places[name]
        dtype = place.spec.dtype
        if values.dtype is not dtype:
            nbytes = values.numel() * dtype.itemsize
            if self._cast.numel() < nbytes:
                self._cast = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            values = self._cast[:nbytes].view(dtype).copy_(values)
        data = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
        file, item = self._file(place.file), dtype.itemsize
        done = 0
        for start, numel in runs(place.spec.shape, offsets, sizes, first, values.numel()):
            _write_all(file, data[done : done + numel * item], place.start + start * item)
            done += numel * item

    def _file(self, name: str) -> int:
        if name not in self._files:
            if len(self._files) >= OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            self._files[name] = os.open(self._folder / name, os.O_WRONLY)
            self._touched.add(name)
        self._files.move_to_end(name)
        return self._files[name]

    def sync(self) -> None:
        """Returns when what was written is on the disk."""
        for name in sorted(self._touched):
            descriptor = os.open(self._folder / name, os.O_WRONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


def runs(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], first: int, numel: int
) -> Iterator[tuple[int, int]]:
    """Elements ``[first, first + numel)`` of a flattened box, as runs (start, numel) of the flattened tensor."""
    dim = len(shape)
    while dim and offsets[dim - 1] == 0 and sizes[dim - 1] == shape[dim - 1]:
        dim -= 1  # everything from here on lies side by side
    inner = math.prod(shape[dim:])
    length = inner * (sizes[dim - 1] if dim else 1)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    while numel:
        row, within = divmod(first, length)
        start = within
        for i in reversed(range(dim)):
            if i == dim - 1:
                start += offsets[i] * strides[i]
            else:
                row, index = divmod(row, sizes[i])
                start += (offsets[i] + index) * strides[i]
        count = min(numel, length - within)
        yield start, count
        first, numel = first + count, numel - count


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
