"""What is found out about a disk, and which settings are chosen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeroengine.disk import probe
from zeroengine.disk.probe import Settings, Speed, best, candidates, disk_of, tune
from zeroengine.disk.swap_files import SwapFolder
from zeroengine.errors import OffloadError
from zeroengine.ops import _aio_library as _aio


def test_the_fastest_is_chosen_and_of_equals_the_one_that_asks_least() -> None:
    def speed(backend: str, depth: int, block: int, gb_s: float) -> Speed:
        return Speed(Settings(backend, depth, block), gb_s, gb_s, gb_s)

    slow = speed("io_uring", 4, 1 << 20, 1.0)
    small, large = speed("io_uring", 16, 1 << 20, 2.0), speed("io_uring", 32, 1 << 20, 2.05)
    threads = speed("threads", 4, 1 << 20, 2.05)
    assert best([slow, large, threads, small]) is small
    assert best([slow, large, threads, speed("threads", 4, 4 << 20, 2.5)]).settings == Settings("threads", 4, 4 << 20)


def test_every_candidate_works(disk: Path) -> None:
    assert {one.backend for one in candidates()} == set(_aio.available())
    for one in candidates():
        with one.queue() as queue:
            assert (queue.backend, queue.depth, queue.block_bytes) == (one.backend, one.queue_depth, one.block_size)


def test_speeds_are_of_what_was_asked_for(disk: Path) -> None:
    folder = SwapFolder(disk, rank=0)
    work = probe.Probe(folder, 3 * probe.PIECE + 5)
    assert list(work.fill()) == [probe.PIECE] * 3
    speeds = probe.measure(work, candidates()[:2])
    assert all(value > 0 for speed in speeds for value in (speed.read, speed.write, speed.both))
    assert [speed.settings for speed in speeds] == candidates()[:2]


def test_tuning_is_done_once_a_disk(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_tuned", {})
    settings = tune(disk)
    assert settings.backend == _aio.available()[0]
    settings.queue().close()
    monkeypatch.setattr(probe, "Probe", None)  # is not needed again
    assert tune(disk) == settings
    with pytest.raises(OffloadError, match="does not exist"):
        tune(disk / "nowhere")


def test_a_disk_is_described(disk: Path) -> None:
    found = disk_of(SwapFolder(disk, rank=0))
    assert found.path == os.path.realpath(disk) and found.filesystem not in ("unknown", "tmpfs")
    assert found.free_bytes > 0 and found.rotational in (True, False, None)
    assert found.block_size is None or found.block_size % 512 == 0
