"""Writing the files of a checkpoint."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from zeroengine.checkpoint import dcp
from zeroengine.checkpoint.checkpointer import cause
from zeroengine.checkpoint.entries import Entry
from zeroengine.partition import Box


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


@pytest.mark.parametrize("room", [0, 100, 300, 600, 700, 900, 1100, 1200])
def test_a_disk_that_fills_up_is_said_to_wherever_it_does(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"x": Entry((8,), torch.float32, [(Box((0,), (8,), 0), torch.ones(8))])}
    monkeypatch.setattr(dcp, "create", lambda path: Full(room))
    with pytest.raises(CheckpointException) as caught:
        dcp.save(tmp_path, entries, {}, {}, None, lambda n: None)
    assert cause(caught.value).endswith("the disk is full (the file)"), "torch.save has words of its own for it"
