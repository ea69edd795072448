"""What is found out about a disk, and which settings are chosen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeroengine.disk import probe
from zeroengine.disk.probe import DiskSettings, DiskSpeed, candidate_settings, describe_disk, fastest, tune
from zeroengine.disk.swap_files import SwapFolder
from zeroengine.errors import OffloadError
from zeroengine.ops import _aio_library as _aio


def test_fastest_prefers_the_fewest_bytes_in_flight_among_equals() -> None:
    def speed(backend: str, depth: int, block: int, gb_s: float) -> DiskSpeed:
        return DiskSpeed(DiskSettings(backend, depth, block), gb_s, gb_s, gb_s)

    slow = speed("io_uring", 4, 1 << 20, 1.0)
    small, large = speed("io_uring", 16, 1 << 20, 2.0), speed("io_uring", 32, 1 << 20, 2.05)
    threads = speed("threads", 4, 1 << 20, 2.05)
    assert fastest([slow, large, threads, small]) is small
    much_faster = speed("threads", 4, 4 << 20, 2.5)
    assert fastest([slow, large, threads, much_faster]) is much_faster


def test_every_candidate_opens_a_queue_with_its_settings(disk: Path) -> None:
    assert {one.backend for one in candidate_settings()} == set(_aio.available())
    for one in candidate_settings():
        with one.queue() as queue:
            assert (queue.backend, queue.depth, queue.block_bytes) == (one.backend, one.queue_depth, one.block_size)


def test_measure_returns_a_speed_for_each_candidate(disk: Path) -> None:
    folder = SwapFolder(disk)
    work = probe.Probe(folder, 3 * probe.TRANSFER_BYTES + 5)
    assert list(work.fill()) == [probe.TRANSFER_BYTES] * 3
    speeds = probe.measure(work, candidate_settings()[:2])
    assert all(value > 0 for speed in speeds for value in (speed.read, speed.write, speed.both))
    assert [speed.settings for speed in speeds] == candidate_settings()[:2]


def test_tune_measures_each_disk_once(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_tuned_by_device", {})
    settings = tune(disk)
    assert settings.backend == _aio.available()[0]
    settings.queue().close()
    monkeypatch.setattr(probe, "Probe", None)  # is not needed again
    assert tune(disk) == settings
    with pytest.raises(OffloadError, match="does not exist"):
        tune(disk / "nowhere")


def test_describe_disk_names_the_file_system_and_free_space(disk: Path) -> None:
    found = describe_disk(SwapFolder(disk))
    assert found.path == os.path.realpath(disk) and found.filesystem not in ("unknown", "tmpfs")
    assert found.free_bytes > 0
