"""Checkpoints that were changed, swapped or removed, by whoever it was: refused, and the engine is as it was."""

from __future__ import annotations

import io
import json
import multiprocessing as mp
import os
import pickle
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import zeroengine
from tests.checkpoint.models import Model, adamw, engine_at
from tests.checkpoint.test_directory import write
from tests.checkpoint.test_engine_checkpoints import fingerprint, refused
from tests.distributed.models import build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, start, take_steps
from zeroengine.checkpoint import content as state
from zeroengine.checkpoint import restore
from zeroengine.checkpoint.directory import LATEST, CheckpointFolder
from zeroengine.checkpoint.folder_lock import LOCK
from zeroengine.checkpoint.manifest import MANIFEST, Manifest
from zeroengine.errors import CheckpointError


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and give it the checksum that fits."""
    tree = json.loads((folder / MANIFEST).read_text())
    del tree["checksum"]
    change(tree)
    try:
        text = Manifest.model_validate(tree).to_json()
    except ValueError:
        text = json.dumps(tree)  # no checksum makes it right
    (folder / MANIFEST).write_text(text)


def alone(engine: zeroengine.Engine, action: Callable[[], object]) -> None:
    """Rank 0 acts while the others wait."""
    if engine.rank == 0:
        action()
    engine.group.all_gather_object(None)


# -- bit flips ----------------------------------------------------------------------------------------


def flip_bits(root: Path, count: int, seed: int) -> list[int]:
    """How many flips of how many loads went unnoticed because they changed nothing that is loaded."""
    engine = engine_at(3)
    take_steps(engine, range(2))
    engine.save_checkpoint(root, "a", client_state={"x": 1})
    saved = fingerprint(engine)
    chance = random.Random(seed)
    refusals = 0
    files = sorted(path for path in (root / "a").iterdir())
    for number in range(count):
        path = files[number % len(files)]
        at, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
        take_steps(engine, range(2, 3))
        before = fingerprint(engine)

        def flip(path: Path = path, at: int = at, bit: int = bit) -> None:
            content = bytearray(path.read_bytes())
            content[at] ^= 1 << bit
            path.write_bytes(content)

        alone(engine, flip)
        try:
            engine.load_checkpoint(root, "a")
        except CheckpointError:
            refusals += 1
            assert fingerprint(engine) == before, (path.name, at, bit)
        else:
            assert fingerprint(engine) == saved, (path.name, at, bit)
        engine.group.all_gather_object(None)
        alone(engine, flip)
    engine.load_checkpoint(root, "a")
    assert fingerprint(engine) == saved
    engine.close()
    return [refusals, count]


def test_a_flipped_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    refusals, count = run_ranks(2, flip_bits, tmp_path, 12, 0)[0]
    assert refusals >= count - 2, "white space in the manifest alone may be changed"


@pytest.mark.slow
def test_a_hundred_flipped_bits_are_found_or_change_nothing(tmp_path: Path) -> None:
    refusals, count = run_ranks(2, flip_bits, tmp_path, 100, 1, timeout=600)[0]
    assert refusals >= count * 0.9


# -- checkpoints without checksums --------------------------------------------------------------------


def damaged_plain(root: Path) -> None:
    engine = engine_at(3)
    take_steps(engine, range(2))

    def save() -> None:
        model = build(Model, seed=5)
        optimizer = adamw(model)
        ids = torch.randint(0, 61, (2, 7))
        model(ids, ids).backward()
        optimizer.step()
        states, optimizer_states = get_state_dict(model, optimizer)
        dcp.save({"model": states, "optimizer": optimizer_states}, checkpoint_id=root / "plain", no_dist=True)
        shutil.copytree(root / "plain", root / "short")
        data = next((root / "short").glob("*.distcp"))
        data.write_bytes(data.read_bytes()[: data.stat().st_size * 2 // 3])
        shutil.copytree(root / "plain", root / "pickle")
        data = next((root / "pickle").glob("*.distcp"))
        content = data.read_bytes()
        last = content.rindex(b"_rebuild_tensor_v2")
        data.write_bytes(content[:last] + b"_rebuild_parameter" + content[last + 18 :])
        shutil.copytree(root / "plain", root / "elsewhere")
        metadata = (root / "plain" / ".metadata").read_bytes()
        name = data.name.encode()
        assert metadata.count(name) >= 1
        outside = b"../" + b"x" * (len(name) - 3)
        (root / "elsewhere" / ".metadata").write_bytes(metadata.replace(name, outside))

    alone(engine, save)
    for name in ("short", "pickle"):
        assert "cannot be read" in refused(engine, root / name) or "refused" in refused(engine, root / name)
    assert "outside of the checkpoint: it is refused" in refused(engine, root / "elsewhere")
    engine.load_checkpoint(root / "plain", fallback=True)
    engine.load_checkpoint(root / "plain")
    engine.close()


def test_a_damaged_checkpoint_of_plain_pytorch_changes_nothing(tmp_path: Path) -> None:
    run_ranks(2, damaged_plain, tmp_path)


# -- objects and hyperparameters ----------------------------------------------------------------------


def hostile_contents(root: Path) -> None:
    engine = engine_at(2)
    take_steps(engine, range(2))
    real, state.storable = state.storable, lambda what, value: value
    engine.save_checkpoint(root, "pickle", client_state={"task": Task()})
    state.storable = real
    assert "could run code: it is refused" in refused(engine, root, "pickle")
    changes: dict[str, Callable[[dict[str, Any]], None]] = {
        "lr": lambda tree: tree["param_groups"][0].update(lr=float("nan")),
        "negative": lambda tree: tree["param_groups"][1].update(lr=-5.0),
        "text": lambda tree: tree["param_groups"][0].update(lr="abc"),
        "no-float": lambda tree: tree["param_groups"][0].update(lr=10**400),
        "betas": lambda tree: tree["param_groups"][0].update(betas=[0.9]),
        "large-betas": lambda tree: tree["param_groups"][0].update(betas=[0.9, 1.5]),
        "no-files": lambda tree: tree.update(files={}),
        "other-files": lambda tree: tree["files"].update({"../../x": tree["files"][".metadata"]}),
        "fewer-files": lambda tree: tree["files"].pop(".metadata"),
        "stage": lambda tree: tree.update(stage=17),
        "counters": lambda tree: tree["counters"].update(global_steps=-1),
    }
    engine.save_checkpoint(root, "a")
    for name, change in changes.items():

        def copy(name: str = name, change: Callable[[dict[str, Any]], None] = change) -> None:
            shutil.copytree(root / "a", root / name)
            rewrite(root / name, change)

        alone(engine, copy)
        assert "is damaged" in refused(engine, root, name), name
    assert r"a tag is a folder's name; found '\x00'" in refused(engine, root, "\0")
    assert "holds a NUL character" in refused(engine, str(root / "\0"))
    engine.load_checkpoint(root, "a")
    alone(engine, lambda: shutil.copytree(root / "a", root / "step-77"))
    with mock.patch.object(restore.log, "warning") as warned:
        engine.load_checkpoint(root, "step-77")
    assert [call.args[1:] for call in warned.call_args_list] == [(root / "step-77", "a", 2)] * (engine.rank == 0)
    engine.close()


def test_contents_that_no_checkpoint_has_are_refused_before_anything_changes(tmp_path: Path) -> None:
    run_ranks(2, hostile_contents, tmp_path)


class Stubborn:
    """A schedule whose state cannot be loaded on one rank."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"last_epoch": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["last_epoch"] == 2 and torch.distributed.get_rank() == 1:
            raise KeyError("last_epoch")
        self.count = state["last_epoch"]


def failing_schedule(root: Path) -> None:
    start()
    model = build(Model)
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    engine = zeroengine.initialize(model, adamw(model), settings, lr_scheduler=Stubborn)
    take_steps(engine, range(2))
    engine.save_checkpoint(root, "a")
    take_steps(engine, range(2, 4))
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.5
    torch.rand(1)
    random_state = torch.get_rng_state()
    assert "KeyError" in refused(engine, root, "a")
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.5, 0.5]
    assert engine.lr_scheduler.count == 4, "on the rank that could load it, too"
    assert torch.equal(torch.get_rng_state(), random_state)
    engine.close()


def test_a_schedule_that_one_rank_cannot_load_leaves_all_ranks_as_they_were(tmp_path: Path) -> None:
    run_ranks(2, failing_schedule, tmp_path)


def odd_values(root: Path) -> None:
    engine = engine_at(1)
    odd = {
        "names": ("a", "b"),
        "some": (None, 1e-3),
        "flags": [True, False],
        "nested": ((0.9, 0.95), 0.99),
        "limit": float("inf"),
        "rates": torch.tensor([1.0, 2.0]),
        "number": numpy.float32(0.5),
        "foreach": None,
        "absent": None,
    }
    for group in engine.optimizer.param_groups:
        group.update(odd)
    engine.save_checkpoint(root, "a")
    for group in engine.optimizer.param_groups:
        group.update({"foreach": True, "absent": 1.0, "rates": torch.zeros(2), "number": 3.0, "limit": 0.0})
    engine.load_checkpoint(root, "a")
    for group in engine.optimizer.param_groups:
        assert (group["number"], group["limit"], group["rates"].tolist()) == (0.5, float("inf"), [1.0, 2.0])
    take_steps(engine, range(1))
    engine.close()


def test_hyperparameters_of_any_kind_come_back(tmp_path: Path) -> None:
    run_ranks(2, odd_values, tmp_path)


def replaced_meanwhile(root: Path) -> None:
    engine = engine_at(2)
    take_steps(engine, range(1))
    engine.save_checkpoint(root, "best")
    real = restore._read_tensors

    def replace(*args: Any) -> None:
        real(*args)
        if engine.rank == 0:  # another process saves the same tag
            (root / "best").rename(root / "before")
            shutil.copytree(root / "before", root / "best")

    restore._read_tensors = replace
    with pytest.raises(CheckpointError, match="was replaced while it was read: load it again"):
        engine.load_checkpoint(root, "best")
    restore._read_tensors = real
    with pytest.raises(CheckpointError, match="after a load that failed half way"):
        engine.save_weights(root / "out")
    engine.load_checkpoint(root, "best", weights_only=True)
    with pytest.raises(CheckpointError, match="after a load that failed half way"):
        engine.save_checkpoint(root, "other")
    engine.load_checkpoint(root, "best")
    engine.save_checkpoint(root, "other")
    engine.close()


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_trained_on(tmp_path: Path) -> None:
    run_ranks(2, replaced_meanwhile, tmp_path)


class Bare:
    """A schedule that has no state."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...


def bare_schedule(root: Path) -> None:
    engine = engine_at(1)
    take_steps(engine, range(1))
    engine.save_checkpoint(root / "runs")
    engine.close()
    model = build(Model, seed=4)
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    engine = zeroengine.initialize(model, adamw(model), settings, lr_scheduler=Bare)
    engine.load_checkpoint(root / "runs", weights_only=True)
    engine.close()


def test_a_schedule_without_state_is_no_hindrance(tmp_path: Path) -> None:
    run_ranks(1, bare_schedule, tmp_path)


def tensor_rate(root: Path) -> None:
    engine = engine_at(1)
    for group in engine.optimizer.param_groups:
        group["initial"] = torch.tensor(0.125)
    engine.save_checkpoint(root, "a")
    assert [group["initial"] for group in CheckpointFolder(root).manifest("a").param_groups] == [0.125, 0.125]
    kept = engine.optimizer.param_groups[0]["initial"]
    kept.fill_(3.0)
    engine.load_checkpoint(root)
    assert kept.item() == 0.125 and engine.optimizer.param_groups[0]["initial"] is kept
    engine.close()


def test_a_hyperparameter_that_is_a_tensor_is_saved_as_its_number(tmp_path: Path) -> None:
    run_ranks(2, tensor_rate, tmp_path)


# -- files that are missing or others ------------------------------------------------------------------


def missing_and_strange(root: Path) -> None:
    engine = engine_at(3)
    for number in range(2):
        take_steps(engine, range(number, number + 1))
        engine.save_checkpoint(root)
    alone(engine, lambda: (root / "step-2" / MANIFEST).rename(root / "aside"))
    for arguments in ((root, "step-2"), (root / "step-2",)):
        assert f"zeroengine wrote it, and {MANIFEST} is missing" in refused(engine, *arguments)
    alone(engine, lambda: (root / "aside").rename(root / "step-2" / MANIFEST))
    strange: dict[str, Callable[[Path], object]] = {
        "is no UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
        "is a folder": lambda path: path.mkdir(),
        "is a loop": lambda path: path.symlink_to(path),
        "leads elsewhere": lambda path: path.write_text("../../x"),
        "is long": lambda path: path.write_text("x" * 10_000),
        "names nothing": lambda path: path.write_text("step-77"),
    }
    for what, make in strange.items():

        def put(make: Callable[[Path], object] = make) -> None:
            path = root / LATEST
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            make(path)

        alone(engine, put)
        said = refused(engine, root)
        assert str(root / LATEST) in said or "step-77" in said, what
        take_steps(engine, range(2, 3))
        engine.load_checkpoint(root, fallback=True)
        assert engine.global_steps == 2, what
    engine.close()


def test_a_missing_manifest_and_a_strange_latest(tmp_path: Path) -> None:
    run_ranks(2, missing_and_strange, tmp_path)


def fails_while_writing(root: Path) -> None:
    """The file goes away after it was checked."""
    engine = engine_at(1)
    take_steps(engine, range(1))
    engine.save_checkpoint(root, "a")
    real = restore._read_tensors

    def breaks(*args: Any) -> None:
        if engine.rank == 1:
            raise CheckpointError("gone")
        real(*args)

    restore._read_tensors = breaks
    with pytest.raises(CheckpointError, match="load a checkpoint that is whole before training goes on"):
        engine.load_checkpoint(root, "a")
    restore._read_tensors = real
    with pytest.raises(CheckpointError, match="after a load that failed half way"):
        take_steps(engine, range(1))
    engine.zero_grad()
    with pytest.raises(CheckpointError, match="after a load that failed half way"):
        engine.save_checkpoint(root, "b")
    engine.load_checkpoint(root, "a")
    take_steps(engine, range(1))
    engine.close()


def test_a_load_that_fails_half_way_is_not_trained_on(tmp_path: Path) -> None:
    run_ranks(2, fails_while_writing, tmp_path)


# -- readers and writers --------------------------------------------------------------------------------


def save_again_and_again(root: Path, times: int) -> None:
    engine = engine_at(1, checkpoint={"keep": 1})
    for number in range(times):
        take_steps(engine, range(number, number + 1))
        engine.save_checkpoint(root)
    (root / "done").touch()
    engine.close()


def load_meanwhile(root: Path) -> int:
    engine, loads = engine_at(1, seed=3), 0
    while not (root / LATEST).exists():
        time.sleep(0.001)
    while not (root / "done").exists():
        engine.load_checkpoint(root)
        loads += 1
    engine.close()
    return loads


def test_a_reader_finds_a_whole_checkpoint_while_another_process_keeps_only_the_newest(tmp_path: Path) -> None:
    writer = threading.Thread(target=run_ranks, args=(1, save_again_and_again, tmp_path, 20))
    writer.start()
    try:
        assert run_ranks(1, load_meanwhile, tmp_path)[0] > 5
    finally:
        writer.join()
    assert CheckpointFolder(tmp_path).latest() == "step-20"
    assert len(CheckpointFolder(tmp_path).tags()) <= 2, "what was read during the last save is removed by the next"


def test_a_checkpoint_that_is_read_is_removed_by_a_later_save(tmp_path: Path) -> None:
    directory = CheckpointFolder(tmp_path)
    write(directory, "a", 1)
    with CheckpointFolder(tmp_path).held("a"):
        write(directory, "b", 2, keep=1)
        assert directory.tags() == ["a", "b"]
    write(directory, "c", 3, keep=1)
    assert directory.tags() == ["c"]


def test_what_is_kept_goes_by_the_order_of_saving(tmp_path: Path) -> None:
    directory = CheckpointFolder(tmp_path)
    for step in (100, 200, 300):
        write(directory, f"step-{step}", step)
    write(directory, "step-150", 150, keep=2)  # after a return to step 100
    assert directory.tags() == ["step-300", "step-150"]
    write(directory, "step-160", 160, keep=2)
    assert directory.tags() == ["step-150", "step-160"]


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_lock_file_that_is_something_else_is_left_alone(kind: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    folder = tmp_path / "runs"
    folder.mkdir()
    lock = folder / LOCK
    {"link": lambda: lock.symlink_to(precious), "folder": lock.mkdir, "pipe": lambda: os.mkfifo(lock)}[kind]()
    with pytest.raises(CheckpointError, match=r"\.lock is not a lock file.*: remove it"):
        CheckpointFolder(folder).open()
    assert precious.read_text() == "keep me"


def hold_until_told(folder: Path, ready: Any, leave: Any, answer: Any) -> None:
    os.environ.update(TORCHELASTIC_RUN_ID="run-1", TORCHELASTIC_RESTART_COUNT="0")
    directory = CheckpointFolder(folder)
    directory.open()
    writing = directory.begin("late", 1)
    ready.set()
    leave.wait(30)
    try:
        write(directory, "late")
    except (CheckpointError, FileNotFoundError) as error:
        answer.put(str(error))
    else:
        answer.put("saved")
    answer.put(writing.exists())


def test_a_later_round_of_a_run_takes_the_folder_over_from_a_frozen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = mp.get_context("forkserver")
    ready, leave, answer = context.Event(), context.Event(), context.Queue()
    frozen = context.Process(target=hold_until_told, args=(tmp_path, ready, leave, answer))
    frozen.start()
    assert ready.wait(60)
    for run, round_ in (("run-2", "1"), ("run-1", "0"), ("none", "1")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", round_)
        with pytest.raises(CheckpointError, match="another job saves into"):
            CheckpointFolder(tmp_path).open()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    directory = CheckpointFolder(tmp_path)
    write(directory, "ours")
    leave.set()
    assert "taken over by a later round of this run" in answer.get(timeout=30)
    assert answer.get(timeout=30) is False, "what it had begun to write is cleared"
    frozen.join()
    assert directory.tags() == ["ours"]
    write(directory, "more")


def test_a_pickle_in_place_of_a_manifest_s_number_is_no_program(tmp_path: Path) -> None:
    directory = CheckpointFolder(tmp_path)
    write(directory, "a")
    (tmp_path / "a" / MANIFEST).write_bytes(pickle.dumps(io.BytesIO()))
    with pytest.raises(CheckpointError, match="is damaged"):
        directory.manifest("a")
