"""The files of torch Distributed Checkpoint: writing them, and reading their metadata safely."""

from __future__ import annotations

import errno
import io
import os
import pathlib
import pickle
import sys
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from zeroengine.checkpoint import dcp_save
from zeroengine.checkpoint.dcp_metadata import METADATA, FileWindow, digest_of_items, read_metadata
from zeroengine.checkpoint.dcp_save import save_files
from zeroengine.checkpoint.entries import StateEntry
from zeroengine.checkpoint.failures import failure_reason
from zeroengine.checkpoint.manifest import checksum_of_file
from zeroengine.errors import CheckpointError
from zeroengine.partition.boxes import Box


class Full(io.BytesIO):
    """A file on a disk that has room for ``room`` bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def write(self, data: Any) -> int:
        self._room -= memoryview(data).nbytes
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the file")
        return super().write(data)


# A small item is written at once, and a larger one record by record.
@pytest.mark.parametrize(
    ("numel", "room"),
    [(8, 0), (8, 300), (1 << 19, 60), (1 << 19, 200), (1 << 19, 1 << 21), (1 << 19, (1 << 21) + 300)],
)
def test_a_disk_that_fills_up_is_said_to_wherever_it_does(
    numel: int, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"x": StateEntry((numel,), torch.float32, [(Box((0,), (numel,), 0), torch.ones(numel))])}
    monkeypatch.setattr(dcp_save, "create", lambda path, known_bytes: Full(room))
    with pytest.raises(OSError) as caught:
        save_files(tmp_path, entries, {}, {}, None, lambda n: None)
    assert failure_reason(caught.value) == "the disk is full (the file)"


def fail_on_rank_1(path: Path) -> str:
    rank = start()
    if rank == 1:
        dcp_save.create = lambda *_: Full(0)  # type: ignore[assignment]
    with pytest.raises(CheckpointError) as caught:
        save_files(path, {}, {f"o{rank}": [1]}, {}, dist.group.WORLD, lambda n: None)
    return str(caught.value)


def test_an_error_of_one_rank_is_one_of_all(tmp_path: Path) -> None:
    assert run_ranks(2, fail_on_rank_1, tmp_path) == ["rank 1: the disk is full (the file)"] * 2


def test_a_save_allocates_no_more_than_the_tensors_of_this_rank_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = []
    monkeypatch.setattr(dcp_save, "create", lambda path, known_bytes: known.append(known_bytes) or open(path, "wb"))
    pieces = [(Box((start,), (8,), start), torch.ones(8)) for start in (0, 16)]
    save_files(tmp_path, {"x": StateEntry((32,), torch.float32, pieces)}, {"y": [1]}, {}, None, lambda n: None)
    assert known == [2 * 8 * 4, 0], "of the file of tensors, and of the metadata"


def save_one(path: Path) -> None:
    entries = {"x": StateEntry((8,), torch.float32, [(Box((0,), (8,), 0), torch.ones(8))])}
    save_files(path, entries, {}, {}, None, lambda n: None)


def entry_of(tensor: torch.Tensor) -> StateEntry:
    box = Box((0,) * tensor.dim(), tuple(tensor.shape), 0)
    return StateEntry(tuple(tensor.shape), tensor.dtype, [(box, tensor)])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn]
)
def test_torch_alone_reads_tensors_of_every_size_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """A view of a larger buffer, of no, one, few and many elements, and one of more than a block."""
    flat = torch.randint(0, 2, (1 << 22,), generator=torch.Generator().manual_seed(0)).to(dtype)
    shapes = [(0, 3), (), (5, 7), (1 << 15,), (3 << 20,)]
    tensors = {f"model.{shape}": flat[3 : 3 + torch.Size(shape).numel()].view(shape) for shape in shapes}
    entries = {name: entry_of(tensor) for name, tensor in tensors.items()}
    saved = {"list": [1, "a"], "tensor": torch.arange(5)}
    save_files(tmp_path, entries, {"object": saved}, {"model.tied": "model.(5, 7)"}, None, lambda n: None)
    loaded: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    loaded |= {"object": None, "model.tied": torch.empty_like(tensors["model.(5, 7)"])}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in [*tensors.items(), ("model.tied", tensors["model.(5, 7)"])]:
        assert torch.equal(loaded[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert loaded["object"].keys() == saved.keys() and torch.equal(loaded["object"]["tensor"], torch.arange(5))


def test_every_byte_is_hashed_once_and_written_once_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()

    class CountedHash:
        def __init__(self) -> None:
            self._hash = xxhash.xxh3_64()

        def update(self, data: Any) -> None:
            counts["hashed"] += memoryview(data).nbytes
            counts["updates"] += 1
            self._hash.update(data)

        def hexdigest(self) -> str:
            return self._hash.hexdigest()

    def counted_crc(data: Any, value: int = 0) -> int:
        counts["crc"] += memoryview(data).nbytes
        return zlib.crc32(data, value)

    monkeypatch.setattr(dcp_save, "xxhash", SimpleNamespace(xxh3_64=CountedHash))
    monkeypatch.setattr(zipfile, "crc32", counted_crc)
    tensors = {f"model.{i}": torch.full((3 << 19,), float(i)) for i in range(4)}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    entries = {name: entry_of(tensor) for name, tensor in tensors.items()}
    files = save_files(tmp_path, entries, {}, {}, None, lambda n: None)
    assert counts["hashed"] == sum(file.bytes for file in files.values())
    assert nbytes <= counts["crc"] < 1.001 * nbytes
    # Each item is two blocks of its values, and what is before and behind them. The pickle of metadata has few writes.
    assert counts["updates"] <= 4 * len(tensors) + 3
    for name, file in files.items():
        assert checksum_of_file(tmp_path / name) == file.xxh3
        if file.items is not None:
            assert digest_of_items(tmp_path / name, read_metadata(tmp_path).items[name]) == file.items


def test_every_record_has_its_checksum_in_the_file(tmp_path: Path) -> None:
    save_files(tmp_path, {"x": entry_of(torch.arange(1 << 18))}, {"o": [1]}, {}, None, lambda n: None)
    for name, items in read_metadata(tmp_path).items.items():
        with open(tmp_path / name, "rb") as file:
            for item in items:
                assert zipfile.ZipFile(FileWindow(file, *item)).testzip() is None


class Asked:
    """Pickled as the result of a call."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


def by_name(member: _MEM_FORMAT_ENCODING, protocol: int) -> Any:
    return getattr, (type(member), member.name)


def by_value(member: _MEM_FORMAT_ENCODING, protocol: int) -> Any:
    return type(member), (member.value,)


@pytest.mark.parametrize("reduce", [by_name, by_value])
def test_metadata_is_read_whichever_way_its_python_pickled_enums(
    reduce: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name up to Python 3.11.3, later by value."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce)
    save_one(tmp_path)
    monkeypatch.undo()
    assert (b"getattr" in (tmp_path / METADATA).read_bytes()) == (reduce is by_name)
    assert list(read_metadata(tmp_path).tensors) == ["x"]


def test_metadata_is_read_wherever_its_python_keeps_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 keeps them in pathlib._local."""
    monkeypatch.setattr(type(tmp_path), "__module__", "pathlib._local")
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)
    save_one(tmp_path)
    monkeypatch.undo()
    assert b"pathlib._local" in (tmp_path / METADATA).read_bytes()
    assert list(read_metadata(tmp_path).tensors) == ["x"]


@pytest.mark.parametrize("asked", [(getattr, Path, "unlink"), (getattr, _MEM_FORMAT_ENCODING, "mro"), (os.getpid,)])
def test_metadata_that_asks_for_anything_else_is_refused(asked: tuple[Any, ...], tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(pickle.dumps(Asked(*asked)))
    with pytest.raises(CheckpointError, match=r"it is refused|cannot be read: KeyError"):
        read_metadata(tmp_path)
