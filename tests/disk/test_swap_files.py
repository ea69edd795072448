"""Swap files: nothing of them outlives their process, and wrong folders are refused."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from zeroengine.disk import mounts
from zeroengine.disk.aligned_memory import aligned_zeros
from zeroengine.disk.queue import DiskQueue
from zeroengine.disk.swap_files import SwapFolder
from zeroengine.errors import OffloadError

NBYTES = 64 << 20


class TestLife:
    def test_files_in_one_folder_are_private(self, disk: Path) -> None:
        first, second = SwapFolder(disk), SwapFolder(disk)
        files = [folder.file("state", 8192) for folder in (first, second)]
        with DiskQueue() as queue:
            for number, file in enumerate(files):
                queue.write(file, 0, torch.full((8192,), number + 1, dtype=torch.uint8)).wait_host()
        assert [file.mapped(0, 8192, torch.uint8).unique().tolist() for file in files] == [[1], [2]]
        first.close()
        assert files[1].mapped(0, 1, torch.uint8).item() == 2

    def test_a_file_has_no_name_and_its_size(self, folder: SwapFolder) -> None:
        before = os.listdir(folder.path)
        file = folder.file("state", 10_000)
        assert os.listdir(folder.path) == before
        found = os.fstat(file.descriptors.buffered)
        assert found.st_nlink == 0 and file.nbytes == found.st_size == 12_288
        assert found.st_blocks * 512 >= file.nbytes, "its space is not taken"
        assert file.path.startswith(folder.path) and "states-state" in file.path

    def test_closing_frees_the_space(self, disk: Path) -> None:
        folder, before = SwapFolder(disk), space_held(os.getpid(), disk)
        file = folder.file("state", NBYTES)
        assert space_held(os.getpid(), disk) == before + NBYTES
        mapped = file.mapped(0, 10, torch.float32).fill_(3)
        folder.close()
        assert space_held(os.getpid(), disk) == before + NBYTES and mapped.sum() == 30, "it is still in use"
        del mapped
        assert space_held(os.getpid(), disk) == before
        folder.file("dropped", NBYTES)
        assert space_held(os.getpid(), disk) == before

    def test_a_killed_process_leaves_nothing(self, disk: Path) -> None:
        code = f"""
            import sys, time, torch
            from zeroengine.disk.aligned_memory import aligned_zeros
            from zeroengine.disk.queue import DiskQueue
            from zeroengine.disk.swap_files import SwapFolder
            folder = SwapFolder(sys.argv[1])
            queue, x = DiskQueue(2, 4096), aligned_zeros(1 << 24, torch.uint8).fill_(1)
            files = [folder.file(str(n), {NBYTES} // 4) for n in range(4)]
            transfers = [queue.write(file, 0, x) for file in files]
            print("begun", flush=True)
            time.sleep(60)
        """
        before = set(os.listdir(disk))
        command = [sys.executable, "-c", textwrap.dedent(code), str(disk)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            assert space_held(process.pid, disk) == NBYTES, "with it goes its space: the files have no names"
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert set(os.listdir(disk)) == before


def space_held(pid: int, disk: Path) -> int:
    """Bytes of the files without names in a folder that a process holds open; a mapping holds it open as well."""
    files, folder = {}, f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(f"{folder}/{name}").startswith(f"{disk}/zeroengine-"):
                found = os.stat(f"{folder}/{name}")
                assert found.st_nlink == 0
                files[found.st_ino] = found.st_size
    return sum(files.values())


class TestRefusals:
    def test_a_missing_folder_is_refused(self, disk: Path) -> None:
        with pytest.raises(OffloadError, match=rf"nvme_path {disk}/nowhere does not exist: write a folder .*mkdir -p"):
            SwapFolder(disk / "nowhere")

    def test_a_file_is_refused(self, disk: Path) -> None:
        (disk / "file").write_text("")
        with pytest.raises(OffloadError, match=r"file is a file: write a folder on a local disk"):
            SwapFolder(disk / "file")

    def test_tmpfs_is_refused(self) -> None:
        if not os.path.isdir("/dev/shm") or not mounts.mount_of("/dev/shm").in_memory:
            pytest.skip("there is no /dev/shm here")
        with pytest.raises(OffloadError, match=r'/dev/shm is on tmpfs, which is memory: .* with "device": "cpu"'):
            SwapFolder("/dev/shm")

    @pytest.mark.parametrize(
        ("number", "what"),
        [
            (errno.EACCES, "cannot be written by this user"),
            (errno.EROFS, "is on a read-only file system"),
            (errno.ENOSPC, "is on a full disk"),
            (errno.ENODEV, r"cannot hold files \(No such device\)"),
        ],
    )
    def test_unwritable_folders_are_refused(
        self, disk: Path, monkeypatch: pytest.MonkeyPatch, number: int, what: str
    ) -> None:
        def fail(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "open", fail)
        with pytest.raises(
            OffloadError, match=rf"nvme_path {disk} {what}: write a folder on a disk that can be written"
        ):
            SwapFolder(disk)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_of_another_user_is_refused(self) -> None:
        with pytest.raises(OffloadError, match="cannot be written by this user"):
            SwapFolder("/")

    def test_procfs_is_refused(self) -> None:
        with pytest.raises(OffloadError, match="nvme_path /proc cannot"):
            SwapFolder("/proc")

    def test_a_disk_with_too_little_room_is_refused(self, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(OffloadError, match=r"has [\d.]+ [MG]iB free, but 1.0 PiB are needed: make room"):
            SwapFolder(disk, min_free_bytes=1 << 50)
        folder = SwapFolder(disk, label="rank3")
        message = r"rank3-big needs 1.0 TiB, .*\(No space left on device; its disk has [\d.]+ [MG]iB free\): make"
        with monkeypatch.context() as patch:
            patch.setattr(folder, "free_bytes", lambda: 10 << 30)
            patch.delattr(os, "posix_fallocate")  # is not even tried: it would fill the disk for others
            with pytest.raises(OffloadError, match=message):
                folder.file("big", 1 << 40)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)  # another took it meanwhile
        with pytest.raises(OffloadError, match=r"rank3-state needs 1.0 MiB, .*No space left on device"):
            folder.file("state", 1 << 20)

    @pytest.mark.parametrize("call", ["open", "pwritev"])
    def test_a_disk_without_direct_io_is_used_after_a_warning(
        self, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
    ) -> None:
        real = getattr(os, call)

        def refuse(*arguments: object) -> object:
            if call == "pwritev" or (isinstance(arguments[1], int) and arguments[1] & os.O_DIRECT):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(*arguments)

        monkeypatch.setattr(os, call, refuse)
        folder = SwapFolder(disk)
        assert not folder.direct and "has no direct I/O; transfers go through the page cache" in caplog.text
        file = folder.file("state", 1 << 16)
        assert not file.direct
        with DiskQueue() as queue:
            queue.write(file, 0, aligned_zeros(1 << 16, torch.uint8).fill_(9)).wait_host()
        assert (file.mapped(0, 1 << 16, torch.uint8) == 9).all()
