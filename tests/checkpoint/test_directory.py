"""A folder of checkpoints: each is whole or absent, and what is wrong is said."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.dying import Died, dying_after
from zeroengine.checkpoint.directory import LATEST, CheckpointFolder, check_tag
from zeroengine.checkpoint.manifest import FORMAT, MANIFEST, FileRecord, Manifest, checksum_of_file, find_damage
from zeroengine.errors import CheckpointError


def write(
    directory: CheckpointFolder,
    tag: str,
    step: int = 0,
    content: bytes = b"x" * 100,
    keep: int | None = None,
    saved_at: str = "now",
) -> None:
    directory.open()
    writing = directory.begin(tag, len(content))
    (writing / "data").write_bytes(content)
    files = {"data": FileRecord(bytes=len(content), xxh3=checksum_of_file(writing / "data"))}
    about: dict[str, Any] = {name: {} for name in ("versions", "counters", "loss_scaler", "config")}
    about |= {"stage": 0, "world_size": 1, "precision": "float32", "optimizer": "AdamW", "saved_at": saved_at}
    directory.commit(writing, Manifest(format=FORMAT, tag=tag, step=step, param_groups=[], files=files, **about), keep)


def damage(directory: CheckpointFolder, tag: str) -> list[str]:
    return find_damage(directory.checkpoint(tag), directory.manifest(tag))


def test_the_newest_is_the_one_committed_last(tmp_path: Path) -> None:
    directory = CheckpointFolder(tmp_path / "deep" / "folder")
    write(directory, "b", 1)
    write(directory, "a", 2)
    assert directory.latest() == "a"
    assert directory.tags() == ["b", "a"], "oldest first"
    assert damage(directory, "a") == []


def test_only_the_last_few_are_kept(tmp_path: Path) -> None:
    directory = CheckpointFolder(tmp_path)
    for step in range(5):
        write(directory, f"step-{step}", step, keep=2)
    assert directory.tags() == ["step-3", "step-4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", LATEST, "step-3", "step-4"]


def test_a_save_on_a_host_whose_clock_is_behind_is_the_newest(tmp_path: Path) -> None:
    directory = CheckpointFolder(tmp_path)
    for step, hour in enumerate((12, 11, 10)):
        write(directory, f"step-{step}", step, keep=2, saved_at=f"2026-01-01T{hour}:00:00+00:00")
    assert directory.tags() == ["step-1", "step-2"]
    (tmp_path / LATEST).unlink()
    assert directory.latest() == "step-2"


def test_a_tag_can_be_written_again(tmp_path: Path) -> None:
    directory = CheckpointFolder(tmp_path)
    write(directory, "best", content=b"old")
    write(directory, "best", content=b"new")
    assert (directory.checkpoint("best") / "data").read_bytes() == b"new"
    assert damage(directory, "best") == []


@pytest.mark.parametrize("again", [False, True], ids=["another tag", "the same tag"])
def test_a_writer_that_dies_between_any_two_operations_leaves_a_whole_checkpoint(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes first, the checkpoint before is there, or the new one."""
    for instant in range(30):
        folder = tmp_path / str(instant)
        directory = CheckpointFolder(folder)
        write(directory, "one", 1, b"first")
        with dying_after(instant, monkeypatch):
            try:
                write(directory, "one" if again else "two", 2, b"second", keep=1)
            except Died:
                pass
            else:
                assert instant > 5, "it died nowhere"
                return
        directory.close()
        for reopened in (False, True):
            after = CheckpointFolder(folder)
            if reopened:
                after.open()
            tag = after.latest()
            assert damage(after, tag) == [], (instant, reopened)
            assert (after.checkpoint(tag) / "data").read_bytes() in (b"first", b"second")
            after.close()
    raise AssertionError("the writer never got through")


def test_each_rename_of_a_save_is_on_the_disk_before_the_next_one_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may lose any names that were not synced: `latest` would name a checkpoint that is not there."""
    directory = CheckpointFolder(tmp_path)
    write(directory, "one")
    events: list[tuple[str, str]] = []
    rename, fsync = Path.rename, os.fsync

    def record_rename(path: Path, target: Path) -> Path:
        events.append(("rename", target.name))
        return rename(path, target)

    def record_fsync(descriptor: int) -> None:
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    monkeypatch.setattr(Path, "rename", record_rename)
    monkeypatch.setattr(os, "fsync", record_fsync)
    write(directory, "two", keep=1)
    named, latest = events.index(("rename", "two")), events.index(("rename", LATEST))
    (removed,) = (i for i, (kind, name) in enumerate(events) if kind == "rename" and name.startswith(".one."))
    in_folder = ("fsync", tmp_path.name)
    assert ("fsync", MANIFEST) in events[:named]
    assert in_folder in events[named:latest], "the checkpoint has its name"
    assert ("fsync", f".{LATEST}.new") in events[:latest]
    assert in_folder in events[latest:removed], "it is the newest before another one goes"


def hold(folder: Path, ready: Any, leave: Any) -> None:
    directory = CheckpointFolder(folder)
    write(directory, "theirs")
    ready.set()
    leave.wait(30)


def test_two_jobs_do_not_save_into_one_folder(tmp_path: Path) -> None:
    context = mp.get_context("forkserver")
    ready, leave = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, ready, leave))
    other.start()
    assert ready.wait(60)
    with pytest.raises(CheckpointError, match=rf"another job saves into .*process {other.pid}.*folder of its own"):
        CheckpointFolder(tmp_path).open()
    assert CheckpointFolder(tmp_path).latest() == "theirs", "reading is free"
    leave.set()
    other.join()
    write(CheckpointFolder(tmp_path), "ours")  # its lock went with it


def test_what_is_absent(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere"):
        CheckpointFolder(tmp_path / "nowhere").latest()
    with pytest.raises(CheckpointError, match=r"holds no checkpoint. engine.save_checkpoint"):
        CheckpointFolder(tmp_path).latest()
    (tmp_path / "file").write_text("")
    for use in (CheckpointFolder.latest, CheckpointFolder.open, CheckpointFolder.tags):
        with pytest.raises(CheckpointError, match=r"file is a file: checkpoints are kept in a folder"):
            use(CheckpointFolder(tmp_path / "file"))
    directory = CheckpointFolder(tmp_path)
    write(directory, "a")
    with pytest.raises(CheckpointError, match=r"checkpoint 'b' in .* does not exist; there are: a"):
        directory.checkpoint("b")
    (tmp_path / "b").mkdir()
    with pytest.raises(CheckpointError, match=r"is not whole: its writer did not finish"):
        directory.checkpoint("b")
    with pytest.raises(CheckpointError, match=r"is one checkpoint, not a folder of them: pass .* tag='a'"):
        CheckpointFolder(tmp_path / "a").latest()


@pytest.mark.parametrize("tag", ["a/b", "", ".hidden", "a b", "..", LATEST, "x\n"])
def test_a_tag_is_a_folder_s_name(tag: str) -> None:
    with pytest.raises(CheckpointError, match='such as "step-1000"'):
        check_tag(tag)


def test_damage_is_found(tmp_path: Path) -> None:
    directory = CheckpointFolder(tmp_path)
    write(directory, "a")
    data = tmp_path / "a" / "data"
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    assert damage(directory, "a") == [f"{data} has 99 bytes, not 100"]
    data.write_bytes(b"y" + whole[1:])
    assert damage(directory, "a") == [f"{data} has been changed: its checksum differs"]
    data.unlink()
    assert damage(directory, "a") == [f"{data} cannot be read: No such file or directory"]
    (tmp_path / "a" / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is damaged"):
        directory.manifest("a")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    directory = CheckpointFolder(tmp_path)
    write(directory, "a")
    path = tmp_path / "a" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
    with pytest.raises(
        CheckpointError, match=f"has format {FORMAT + 1}; this version of zeroengine reads up to {FORMAT}"
    ):
        directory.manifest("a")


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path) -> None:
    directory = CheckpointFolder(tmp_path)
    write(directory, "a")
    with pytest.raises(CheckpointError, match=r"is full: the checkpoint takes [\d,]+ MiB"):
        directory.begin("b", 1 << 60)
    assert directory.tags() == ["a"]
