"""Swap files: nothing of them outlives their process, wrong folders are refused, and mappings see what transfers do."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from zeroengine.disk import mounts
from zeroengine.disk.aligned_memory import aligned_empty
from zeroengine.disk.mapped_memory import release_mapped
from zeroengine.disk.queue import DiskQueue
from zeroengine.disk.swap_files import SwapFolder
from zeroengine.errors import OffloadError

NBYTES = 64 << 20


def memory_of_files() -> int:
    """This process's resident pages of files, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) << 10
    raise AssertionError


class TestLife:
    def test_files_are_private_though_they_share_a_folder(self, disk: Path) -> None:
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

    def test_closing_gives_the_space_back(self, disk: Path) -> None:
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
            from zeroengine.disk.aligned_memory import aligned_empty
            from zeroengine.disk.queue import DiskQueue
            from zeroengine.disk.swap_files import SwapFolder
            folder = SwapFolder(sys.argv[1])
            queue, x = DiskQueue(2, 4096), aligned_empty(1 << 24, torch.uint8).fill_(1)
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
    def test_no_folder(self, disk: Path) -> None:
        with pytest.raises(OffloadError, match=rf"nvme_path {disk}/nowhere does not exist: write a folder .*mkdir -p"):
            SwapFolder(disk / "nowhere")

    def test_a_file(self, disk: Path) -> None:
        (disk / "file").write_text("")
        with pytest.raises(OffloadError, match=r"file is a file: write a folder on a local disk"):
            SwapFolder(disk / "file")

    def test_memory(self) -> None:
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
    def test_what_cannot_be_written(self, disk: Path, monkeypatch: pytest.MonkeyPatch, number: int, what: str) -> None:
        def fail(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "open", fail)
        with pytest.raises(
            OffloadError, match=rf"nvme_path {disk} {what}: write a folder on a disk that can be written"
        ):
            SwapFolder(disk)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_another_users_folder(self) -> None:
        with pytest.raises(OffloadError, match="cannot be written by this user"):
            SwapFolder("/")

    def test_no_file_system_for_files(self) -> None:
        with pytest.raises(OffloadError, match="nvme_path /proc cannot"):
            SwapFolder("/proc")

    def test_too_little_room(self, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def test_no_direct_io_is_said_and_done_without(
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
            queue.write(file, 0, aligned_empty(1 << 16, torch.uint8).fill_(9)).wait_host()
        assert (file.mapped(0, 1 << 16, torch.uint8) == 9).all()


class TestMapped:
    @pytest.mark.parametrize("offset", [0, 4096, 4, 12_300])
    def test_it_is_that_part_of_the_file(self, folder: SwapFolder, offset: int) -> None:
        file, values = folder.file("part", 1 << 16), torch.arange((1 << 16) // 4, dtype=torch.int32)
        with DiskQueue() as queue:
            queue.write(file, 0, values).wait_host()
            mapped = file.mapped(offset, 1000, torch.int32)
            assert torch.equal(mapped, values[offset // 4 :][:1000])
            mapped += 7
            into = torch.empty_like(values)
            queue.read(file, 0, into).wait_host()
        values[offset // 4 :][:1000] += 7
        assert torch.equal(into, values)

    def test_mappings_and_transfers_see_each_other(self, folder: SwapFolder, backend: str) -> None:
        pages, page = 64, 1024  # of float32
        file, model = folder.file("both", pages * page * 4), torch.zeros(pages * page)
        mapped, chance = file.mapped(0, pages * page, torch.float32), random.Random(1)
        with DiskQueue(4, 8192, backend) as queue:
            for number in range(300):
                first, last = sorted(chance.sample(range(pages + 1), 2))
                part = slice(first * page, last * page)
                values = aligned_empty((last - first) * page, torch.float32).fill_(number)
                match chance.randrange(5):
                    case 0:
                        mapped[part] = values
                        model[part] = values
                    case 1:
                        queue.write(file, part.start * 4, values).wait_host()
                        model[part] = values
                    case 2:
                        queue.read(file, part.start * 4, values).wait_host()
                        assert torch.equal(values, model[part])
                    case 3:
                        assert torch.equal(mapped[part], model[part])
                    case 4:
                        release_mapped(mapped[part])
        assert torch.equal(mapped, model)

    def test_released_pages_are_nobodys_memory_and_keep_their_data(self, folder: SwapFolder) -> None:
        nbytes = 64 << 20
        file = folder.file("pages", nbytes)
        before = memory_of_files()
        mapped = file.mapped(0, nbytes // 4, torch.float32).fill_(2.5)
        assert memory_of_files() > before + nbytes // 2
        release_mapped(mapped[: mapped.numel() // 2])
        assert memory_of_files() < before + nbytes * 3 // 4
        release_mapped(mapped)
        assert memory_of_files() < before + nbytes // 8
        assert (mapped[::4096] == 2.5).all()

    def test_wrong_uses_are_refused(self, folder: SwapFolder) -> None:
        file = folder.file("wrong", 8192)
        with pytest.raises(OffloadError, match=r"offset 2 in .*: torch.float32 needs a multiple of 4"):
            file.mapped(2, 10, torch.float32)
        with pytest.raises(OffloadError, match=r"8,192 bytes at offset 4 of .*, which has 8,192"):
            file.mapped(4, 2048, torch.float32)
        assert file.mapped(8192, 0, torch.float32).numel() == 0
        for tensor in (torch.ones(5000), aligned_empty(5000, torch.float32).fill_(1)):
            with pytest.raises(OffloadError, match=r"not one of SwapFile.mapped"):
                release_mapped(tensor)
            assert tensor.sum() == 5000, "its pages are gone"
        file.close()
        with pytest.raises(OffloadError, match="is closed"):
            file.mapped(0, 10, torch.float32)


def test_the_mount_of_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:20 / /tmp rw - tmpfs tmpfs rw
24 22 259:1 / /mnt/big\\040disk rw,noatime master:2 - xfs /dev/nvme0n1p1 rw,attr2
25 22 259:2 / /mnt rw - btrfs /dev/sda1 rw
26 22 259:2 / /mnt rw - ext4 /dev/sdb1 rw
"""
    table = tmp_path / "mountinfo"
    table.write_text(lines)
    real = open
    monkeypatch.setattr("builtins.open", lambda path, *rest: real(table if "mountinfo" in str(path) else path, *rest))
    found = {path: mounts.mount_of(path) for path in ("/", "/tmp/x", "/mnt/big disk/runs", "/mnt/big", "/tmpfile")}
    assert [(mount.filesystem, mount.device, mount.in_memory) for mount in found.values()] == [
        ("ext4", "/dev/vda", False),
        ("tmpfs", "tmpfs", True),
        ("xfs", "/dev/nvme0n1p1", False),
        ("ext4", "/dev/sdb1", False),
        ("ext4", "/dev/vda", False),
    ]
