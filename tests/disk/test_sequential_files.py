"""What is written from start to end is what is in the file when it is closed; an error is the system's own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.disk.faults import set_fault
from zeroengine.disk import sequential_files
from zeroengine.disk.sequential_files import BUFFER_BYTES, NUM_BUFFERS, DirectFile, SyncedFile
from zeroengine.ops import _aio_library as _aio

ROUND = NUM_BUFFERS * BUFFER_BYTES
sizes = st.sampled_from([0, 1, 4095, 4096, 4097, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, ROUND + 5])


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(disk: Path) -> Path:
    return disk / "sequential"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(sizes | st.integers(0, 3 * BUFFER_BYTES), max_size=6), seed=st.integers(0, 255))
def test_the_file_is_what_was_written_to_it(path: Path, pieces: list[int], seed: int) -> None:
    noise = bytes((i * 197 + seed) % 251 for i in range(1 << 16)) * (ROUND // (1 << 16) + 1)
    expected, before = bytearray(), num_open()
    path.write_bytes(b"of another, longer" * 1000)  # gives way
    with DirectFile(path) as file:
        for i, nbytes in enumerate(pieces):
            data = noise[i : i + nbytes]
            assert file.write(memoryview(data) if i % 2 else data) == nbytes
            expected += data
            assert file.tell() == len(expected)
    assert path.read_bytes() == expected
    assert file.closed and num_open() == before
    file.close()  # again


@pytest.mark.parametrize("known_bytes", [0, BUFFER_BYTES + 1, 3 * BUFFER_BYTES])
def test_no_space_is_taken_from_the_disk_but_what_is_known_to_be_written(path: Path, known_bytes: int) -> None:
    with DirectFile(path, known_bytes) as file:
        file.write(bytes(2 * BUFFER_BYTES - 1))
        # One buffer is sent. A file system may count blocks of its own.
        assert path.stat().st_blocks * 512 <= max(known_bytes, BUFFER_BYTES) + (1 << 16)
        file.write(bytes(BUFFER_BYTES + 1))
    assert path.stat().st_blocks * 512 <= 3 * BUFFER_BYTES + (1 << 16)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("first", [1, 6, 17])  # of 1 MiB blocks: within a write, and at the end
def test_a_disk_that_fails_raises_oserror(path: Path, code: int, first: int) -> None:
    before = num_open()
    with pytest.raises(OSError) as caught, DirectFile(path) as file:
        set_fault(code, first, 100)
        file.write(bytes(ROUND + 12345))
        file.close()
    assert caught.value.errno == code and caught.value.filename == str(path)
    assert file.closed and num_open() == before


def test_a_transfer_that_is_cut_short_is_continued(path: Path) -> None:
    data = os.urandom(ROUND + 12345)
    with DirectFile(path) as file:
        set_fault("short", 2, 5)
        file.write(data)
    assert path.read_bytes() == data


def test_an_exception_in_the_with_block_passes_through(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = num_open()
    with pytest.raises(KeyError), DirectFile(path) as file:
        file.write(bytes(2 * BUFFER_BYTES))
        raise KeyError
    assert num_open() == before
    with pytest.raises(KeyError), DirectFile(path) as file:
        set_fault(errno.EIO, 1, 100)
        file.write(bytes(2 * BUFFER_BYTES))
        raise KeyError
    del file
    assert not caplog.records, "one error is enough"


def test_other_file_systems_use_the_page_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential_files, "DIRECT_FILESYSTEMS", ())
    with sequential_files.create(path) as file:
        assert isinstance(file, SyncedFile)
        file.write(b"abc")
        assert file.tell() == 3
    assert path.read_bytes() == b"abc"
    with pytest.raises(OSError):
        sequential_files.create(path.parent / "absent" / "file")


def test_without_the_disk_library_the_page_cache_is_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_aio, "PATH", path.parent / "absent.so")
    _aio.library.cache_clear()
    try:
        assert isinstance(sequential_files.create(path), SyncedFile)
    finally:
        _aio.library.cache_clear()
