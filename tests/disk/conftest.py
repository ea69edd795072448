"""Folders for states on a disk, and a test once for each backend that this machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disk.faults import set_fault
from zeroengine.disk.swap_files import SwapFolder
from zeroengine.ops import _aio_library as _aio


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    """End every fault with the test that set it."""
    if not _aio.PATH.exists():
        pytest.skip("zeroengine's disk library was not built")
    yield
    set_fault("none")


@pytest.fixture(params=["io_uring", "threads"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param not in _aio.available():
        pytest.skip(f"this machine has no {request.param}")
    return request.param


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def folder(request: pytest.FixtureRequest, disk: Path) -> Iterator[SwapFolder]:
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            patch.delattr(os, "O_DIRECT")
        folder = SwapFolder(disk)
    if folder.direct != request.param:
        pytest.skip("this disk has no direct I/O")
    yield folder
    folder.close()
