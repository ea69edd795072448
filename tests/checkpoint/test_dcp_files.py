"""The files of torch Distributed Checkpoint: writing them, and reading their metadata safely."""

from __future__ import annotations

import errno
import io
import os
import pathlib
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from zeroengine.checkpoint import dcp_save
from zeroengine.checkpoint.dcp_metadata import METADATA, read_metadata
from zeroengine.checkpoint.dcp_save import save_files
from zeroengine.checkpoint.entries import StateEntry
from zeroengine.checkpoint.failures import failure_reason
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
    [(8, 0), (8, 300), (1 << 19, 600), (1 << 19, 900), (1 << 19, 1 << 21), (1 << 19, (1 << 21) + 1000)],
)
def test_a_disk_that_fills_up_is_said_to_wherever_it_does(
    numel: int, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"x": StateEntry((numel,), torch.float32, [(Box((0,), (numel,), 0), torch.ones(numel))])}
    monkeypatch.setattr(dcp_save, "create", lambda path, known_bytes: Full(room))
    with pytest.raises(CheckpointException) as caught:
        save_files(tmp_path, entries, {}, {}, None, lambda n: None)
    assert failure_reason(caught.value).endswith("the disk is full (the file)"), (
        "torch.save has words of its own for it"
    )


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
