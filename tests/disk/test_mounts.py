"""File systems of paths, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroengine.disk import mounts


def test_the_mount_of_a_path_is_the_longest_and_the_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
