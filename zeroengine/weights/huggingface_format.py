"""Write sharded safetensors with an index, as Hugging Face writes and loads them, piece by piece.

    out/
      model-00001-of-00002.safetensors
      model-00002-of-00002.safetensors
      model.safetensors.index.json        which tensor lies in which file

or one `model.safetensors`. Sizes and positions are known before any value is. So the headers are written first, and
values then go to their places in any order, from any process, and no more is held than the piece at hand.

Torch's `HuggingFaceStorageWriter` (2.13) does not serve here. Of 1 GiB in three files it held 768 MiB in memory and
took 27 s, and 72 s and twice the disk where every rank writes and the files are consolidated, against no memory and
16 s here. It neither casts nor records tied names.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroengine.checkpoint.directory import natural_order, sync_path
from zeroengine.errors import CheckpointError
from zeroengine.weights.output_folder import INDEX, SINGLE

# The names of dtypes in the files, which the library has no public table of.
DTYPE_NAMES = {
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
MAX_OPEN_FILES = 64


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the tensor's values in bytes."""
        return self.numel * self.dtype.itemsize


def cast_spec(spec: TensorSpec, dtype: str | None) -> TensorSpec:
    """Return the spec of a tensor after a cast to torch's dtype of that name, which only floating ones take."""
    return TensorSpec(spec.shape, getattr(torch, dtype)) if dtype and spec.dtype.is_floating_point else spec


@dataclass(frozen=True)
class TensorPlacement:
    """The file and the byte where a tensor's values begin."""

    file: str
    start: int
    spec: TensorSpec


@dataclass(frozen=True)
class FileLayout:
    """Every file of an export before there is one: the same on all ranks that make it of the same tensors.

    Attributes:
        placements: Where each tensor lies.
        headers: The first bytes of each file.
        sizes: The bytes of each file, with its header.
        index: The text of the index; None where there is one file.
    """

    placements: dict[str, TensorPlacement]
    headers: dict[str, bytes]
    sizes: dict[str, int]
    index: str | None

    @property
    def nbytes(self) -> int:
        """The size of all files in bytes."""
        return sum(self.sizes.values())


def plan_files(tensors: Mapping[str, TensorSpec], tied: Mapping[str, str], shard_size: int) -> FileLayout:
    """Distribute tensors over files, in their names' order.

    Args:
        tensors: The tensors by name.
        tied: Further names, and the names that they stand for; recorded in the metadata and not written.
        shard_size: The bytes of values in a file at most. A larger tensor has a file to itself.

    Raises:
        CheckpointError: Safetensors has no dtype of a tensor.
    """
    for name, spec in tensors.items():
        if spec.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name} is {spec.dtype}, which safetensors files cannot hold")
    groups: list[list[str]] = [[]]
    filled = 0
    # Layers are ordered by number, so each file holds consecutive layers, as those that Hugging Face writes.
    for name in sorted(tensors, key=natural_order):
        nbytes = tensors[name].nbytes
        # A tensor is never split, since readers expect it in one file.
        if groups[-1] and filled + nbytes > shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    count = len(groups)
    files = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    metadata = {"tied": json.dumps(dict(sorted(tied.items())))} if tied else {}
    placements: dict[str, TensorPlacement] = {}
    headers: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for file, names in zip(files, groups, strict=True):
        header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
        end = 0
        starts = {}
        # The tensors are sorted from the widest dtype to the narrowest. Each is then aligned to its own element size
        # without any padding, which safetensors forbids.
        for name in sorted(names, key=lambda name: -tensors[name].dtype.itemsize):
            spec, starts[name] = tensors[name], end
            end += spec.nbytes
            header[name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [starts[name], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        # The header is padded with spaces to 8 bytes, as the format recommends, so that the values are aligned.
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        sizes[file] = len(headers[file]) + end
        placements |= {name: TensorPlacement(file, len(headers[file]) + starts[name], tensors[name]) for name in names}
    if count == 1:
        return FileLayout(placements, headers, sizes, None)
    total = sum(spec.nbytes for spec in tensors.values())
    weight_map = {name: placement.file for name, placement in placements.items()}
    index = json.dumps({"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}, indent=2)
    return FileLayout(placements, headers, sizes, index + "\n")


class SafetensorsWriter:
    """Write values to their places in the files of a folder.

    Several processes may write into the same folder: one calls `create` before any other writes.
    """

    def __init__(self, folder: Path, layout: FileLayout) -> None:
        self._folder, self._layout = folder, layout
        self._files: OrderedDict[str, int] = OrderedDict()
        self._touched: set[str] = set()
        # The memory of casts is reused: fresh pages would take longer than the cast.
        self._cast = torch.empty(0, dtype=torch.uint8, device="cpu")

    def create(self) -> None:
        """Make the files, at their full size and with their headers, and the index."""
        for name, header in self._layout.headers.items():
            with open(self._folder / name, "wb") as file:
                file.write(header)
                # The full size is set at once, so several processes can write at their positions in any order.
                file.truncate(self._layout.sizes[name])
            self._touched.add(name)
        if self._layout.index is not None:
            (self._folder / INDEX).write_text(self._layout.index)
            self._touched.add(INDEX)

    def write(self, name: str, offsets: Sequence[int], sizes: Sequence[int], first: int, values: torch.Tensor) -> None:
        """Cast and write some elements of a box of a tensor.

        Args:
            name: The tensor.
            offsets: The box's first element in each dimension.
            sizes: The box's elements in each dimension.
            first: The index within the flattened box of the first of `values`.
            values: The elements: 1-D, on the CPU.
        """
        placement = self._layout.placements[name]
        dtype = placement.spec.dtype
        # The caller's values stay as they are, for they may be views of the engine's states.
        if values.dtype is not dtype:
            nbytes = values.numel() * dtype.itemsize
            if self._cast.numel() < nbytes:
                self._cast = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            values = self._cast[:nbytes].view(dtype).copy_(values)
        # torch has no type for it, but an array has a buffer.
        data = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
        file, itemsize = self._file(placement.file), dtype.itemsize
        written = 0
        for start, numel in runs_of_box(placement.spec.shape, offsets, sizes, first, values.numel()):
            _write_all(file, data[written : written + numel * itemsize], placement.start + start * itemsize)
            written += numel * itemsize

    def _file(self, name: str) -> int:
        """Return the descriptor of a file. The file unused for longest is closed where there are too many."""
        if name not in self._files:
            # A process may open only so many files, and a large model has more shards than that.
            if len(self._files) >= MAX_OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            self._files[name] = os.open(self._folder / name, os.O_WRONLY)
            self._touched.add(name)
        self._files.move_to_end(name)
        return self._files[name]

    @contextlib.contextmanager
    def synced(self) -> Iterator[None]:
        """Close the files at the end; where no error was raised, everything that was written is on the disk then."""
        try:
            yield
        finally:
            while self._files:
                os.close(self._files.popitem()[1])
        # Files that were closed to stay below the limit are not on the disk yet, so each is opened again to sync it.
        for name in sorted(self._touched):
            sync_path(self._folder / name)


def runs_of_box(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], first: int, numel: int
) -> Iterator[tuple[int, int]]:
    """Yield some elements of a flattened box as runs of the flattened tensor.

    Args:
        shape: The tensor's shape.
        offsets: The box's first element in each dimension.
        sizes: The box's elements in each dimension.
        first: The index of the first element within the flattened box.
        numel: The number of elements.

    Yields:
        The index of a run's first element within the flattened tensor, and the number of its elements.
    """
    dim = len(shape)
    # Dimensions that the box covers in full are contiguous, so their elements belong to one run.
    while dim and offsets[dim - 1] == 0 and sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    inner = math.prod(shape[dim:])
    length = inner * (sizes[dim - 1] if dim else 1)
    strides = [math.prod(shape[i + 1 :]) for i in range(dim)]
    box_start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=False))
    while numel:
        row, start = divmod(first, length)
        count = min(numel, length - start)
        # Convert the row within the box to an offset within the tensor, one dimension at a time.
        for i in reversed(range(dim - 1)):
            row, index = divmod(row, sizes[i])
            start += index * strides[i]
        yield box_start + start, count
        first, numel = first + count, numel - count


def _write_all(file: int, data: memoryview, position: int) -> None:
    # One call may write less than it was given, for example on a disk that is nearly full.
    while data:
        count = os.pwrite(file, data, position)
        data, position = data[count:], position + count
