"""Runs go on from snapshots in memory, bit for bit, whatever is lost with one host."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zeroengine
from tests.checkpoint.models import engine_at
from tests.distributed.ranks import run_ranks
from tests.distributed.training import take_steps
from zeroengine.checkpoint.manifest import MANIFEST
from zeroengine.recovery import snapshots as module
from zeroengine.recovery.snapshots import MemorySnapshots

MORE = 3  # steps after going on


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, for those of the hosts."""
    folder = Path(f"/dev/shm/zeroengine-test-{os.getpid()}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def engine_on(memory: Path, num_hosts: int, *, every: float = 1e6, copies: int | None = None, **more: Any) -> Any:
    """The engine of a rank, where each host has equally many and a folder of its own."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host = f"node-{rank * num_hosts // size}"
    os.environ["ZEROENGINE_HOST"] = host
    os.environ["ZEROENGINE_SNAPSHOT_FOLDER"] = str(memory / host)
    section = {"every_seconds": every, "copies": copies}
    return engine_at(more.pop("stage", 3), snapshots=section, **more)


def snapshots_of(engine: Any) -> MemorySnapshots:
    return engine._parts.loop.snapshots  # type: ignore[no-any-return]


def take(engine: Any) -> None:
    engine._checkpoints.take_snapshot(snapshots_of(engine))
    snapshots_of(engine).find()


def train(memory: Path, num_hosts: int, steps: int, disk: Path | None = None, copies: int | None = None) -> list[str]:
    """Snapshots after each of the last two steps but one; a step more is lost. Returns what the folder has."""
    engine = engine_on(memory, num_hosts, copies=copies)
    for step in range(steps):
        take_steps(engine, range(step, step + 1))
        if disk is not None and step == 0:
            engine.save_checkpoint(disk)
        if steps - 3 <= step < steps - 1:
            take(engine)
    engine.close()
    assert not [thread.name for thread in threading.enumerate() if "snapshot" in thread.name]
    return sorted(path.name for path in (memory / os.environ["ZEROENGINE_HOST"]).glob("step-*"))


def go_on(memory: Path, num_hosts: int, disk: Path | None = None, **more: Any) -> tuple[bool, int, list[float], str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    engine = engine_on(memory, num_hosts, seed=9, **more)
    resumed = engine.resume(disk)
    begin = engine.global_steps
    losses = take_steps(engine, range(begin, begin + MORE))
    take(engine)
    engine.close()
    said = ("resumed", "snapshots in memory", "newest checkpoint that is whole", "engine.resume")
    return resumed, begin, losses, "\n".join(line for line in lines if any(word in line for word in said))


def inodes(memory: Path) -> list[set[int]]:
    """Those of the files with values in the folder of this rank's host, after each of four snapshots."""
    engine, found = engine_on(memory, 2), []
    for step in range(4):
        take_steps(engine, range(step, step + 1))
        take(engine)
        folder = memory / os.environ["ZEROENGINE_HOST"]
        found.append({path.stat().st_ino for path in folder.glob("step-*/*.distcp")})
    engine.close()
    return found


def test_a_snapshot_is_written_over_the_files_of_the_one_before_the_last(memory: Path) -> None:
    for first, second, third, fourth in run_ranks(2, inodes, memory):
        assert len(first) == 2 and not first & second, "a rank's own file and the copy of another's"
        assert (third, fourth) == (first, second)
    assert list(memory.rglob(".step-*")) == []


def unlisted_files(memory: Path) -> list[str]:
    """Those in the snapshots of a job that goes on, which no manifest lists."""
    engine, found = engine_on(memory, 1), []
    engine.resume()
    for step in range(3):
        take_steps(engine, range(step, step + 1))
        take(engine)
        for folder in (memory / os.environ["ZEROENGINE_HOST"]).glob("step-*"):
            listed = json.loads((folder / MANIFEST).read_text())["files"]
            found += [path.name for path in folder.iterdir() if path.name not in {MANIFEST, *listed}]
    engine.close()
    return found


def test_a_job_with_fewer_ranks_keeps_no_file_of_the_earlier_one(memory: Path) -> None:
    run_ranks(3, train, memory, 1, 5)
    assert run_ranks(2, unlisted_files, memory) == [[], []]


def reference(steps: int) -> list[float]:
    return take_steps(engine_at(3), range(steps))


@pytest.mark.parametrize(("num_hosts", "lost"), [(1, None), pytest.param(2, 0, marks=pytest.mark.slow), (2, 1)])
def test_a_run_goes_on_without_the_memory_of_any_one_host(memory: Path, num_hosts: int, lost: int | None) -> None:
    steps = 5
    held = run_ranks(2, train, memory, num_hosts, steps)
    # The newest one is left.
    assert all(len(names) == 1 and names[0].startswith("step-4.2-") for names in held)
    if lost is not None:
        shutil.rmtree(memory / f"node-{lost}")
    expected = run_ranks(2, reference, steps - 1 + MORE)
    for rank, (resumed, begin, losses, text) in enumerate(run_ranks(2, go_on, memory, num_hosts)):
        assert resumed and begin == steps - 1
        assert losses == expected[rank][begin:]
        hosts = num_hosts - (lost is not None)
        if rank == 0:
            assert f"resumed from the snapshot of step 4 in the memory of {hosts} host" in text
            assert "1 step was lost; there is no checkpoint" in text
    assert [path for path in memory.rglob("*.writing")] == []


def test_other_numbers_of_ranks_go_on(memory: Path) -> None:
    run_ranks(2, train, memory, 2, 5)
    # The third host has nothing, and the second one is gone.
    shutil.rmtree(memory / "node-1")
    for ranks, hosts in ((1, 1), (3, 3)):
        for resumed, begin, _, _ in run_ranks(ranks, go_on, memory, hosts):
            assert resumed and begin >= 4


def test_the_newer_of_memory_and_disk_is_loaded(memory: Path, tmp_path: Path) -> None:
    run_ranks(1, train, memory, 1, 5, tmp_path / "a")
    text = run_ranks(1, go_on, memory, 1, tmp_path / "a")[0][3]
    assert "from the snapshot of step 4" in text
    assert f"the newest checkpoint in {tmp_path / 'a'} is of step 1" in text
    shutil.rmtree(memory / "node-0")
    resumed, begin, _, text = run_ranks(1, go_on, memory, 1, tmp_path / "a")[0]
    assert (
        resumed and begin == 1 and "from the checkpoint of step 1" in text and "no snapshot in memory is whole" in text
    )
    shutil.rmtree(memory / "node-0")
    shutil.rmtree(tmp_path / "a")
    assert run_ranks(1, go_on, memory, 1, tmp_path / "a")[0][:2] == (False, 0)


def load_by_tag(memory: Path, disk: Path) -> list[int]:
    engine = engine_on(memory, 1)
    steps = []
    for tag in (None, "step-1", None):
        engine.load_checkpoint(disk, tag)
        steps.append(engine.global_steps)
    # After a return to an earlier checkpoint the snapshots from there on count.
    take(engine)
    assert engine.resume()
    return [*steps, engine.global_steps]


def test_a_named_tag_means_the_disk_and_a_rollback_makes_later_snapshots_count(memory: Path, tmp_path: Path) -> None:
    run_ranks(1, train, memory, 1, 5, tmp_path / "a")
    assert run_ranks(1, load_by_tag, memory, tmp_path / "a") == [[4, 1, 1, 1]]


def zero_out(*paths: Path) -> None:
    for path in paths:
        path.write_bytes(bytes(path.stat().st_size))


def test_a_damaged_file_is_named_and_its_copy_is_read(memory: Path) -> None:
    run_ranks(2, train, memory, 2, 5)
    (file,) = memory.glob("node-1/step-*/__1_*")
    zero_out(file)
    rows = run_ranks(2, go_on, memory, 2)
    assert all(row[:2] == (True, 4) for row in rows)
    said, resumed = rows[0][3].splitlines()
    damage = f"on node-1 (rank 1) {file} has been changed: its checksum differs"
    assert said == f"snapshots in memory: {damage}; that of step 4 is whole"
    assert resumed.startswith("resumed from the snapshot of step 4") and rows[1][3] == ""
    zero_out(*memory.glob("node-*/step-*/__0_*"))
    rows = run_ranks(2, go_on, memory, 2)
    assert all(row[:2] == (False, 0) for row in rows)
    # The round has looked for a snapshot, so it is not told to do so at its first step.
    (said,) = rows[0][3].splitlines()
    assert said.startswith("snapshots in memory: that of step 7 is not whole; on node-") and rows[1][3] == ""
    assert all(f"on node-{host} (rank 0) " in said for host in (0, 1)) and said.endswith("; none is whole")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.slow  # the test above has a file whose checksum differs
@pytest.mark.parametrize(
    ("name", "spoil", "text"),
    [
        ("__1_0.distcp", cut, r"on node-1 \(rank 1\) \S+/__1_0.distcp has [\d,]+ bytes, not [\d,]+"),
        (
            "__1_0.distcp",
            Path.unlink,
            r"on node-1 \(rank 1\) \S+/__1_0.distcp cannot be read: No such file.*",
        ),
        ("__0_0.distcp", cut, r"on node-1 \(rank 0\) \S+/__0_0.distcp has [\d,]+ bytes, not [\d,]+"),
        (".metadata", cut, r"on node-1 \S+/.metadata has [\d,]+ bytes, not [\d,]+"),
        ("zeroengine.json", cut, r"on node-1 \S+/zeroengine.json is damaged: .+"),
        ("zeroengine.json", Path.unlink, "on node-1 checkpoint 'step-4.*' in .* is not whole: .+"),
    ],
)
def test_whatever_is_damaged_on_one_host_is_named_and_costs_no_bits(
    memory: Path, name: str, spoil: Any, text: str
) -> None:
    run_ranks(2, train, memory, 2, 5)
    expected = run_ranks(2, reference, 4 + MORE)
    spoil(next(memory.glob(f"node-1/step-4.*/{name}")))
    rows = run_ranks(2, go_on, memory, 2)
    assert [row[:3] for row in rows] == [(True, 4, losses[4:]) for losses in expected]
    said, resumed = rows[0][3].splitlines()
    assert re.fullmatch(f"snapshots in memory: {text}; that of step 4 is whole", said)
    assert resumed.startswith("resumed from the snapshot of step 4")


def spoiled_checkpoints(memory: Path, disk: Path) -> None:
    engine = engine_on(memory, 1)
    for step in range(4):
        take_steps(engine, range(step, step + 1))
        engine.save_checkpoint(disk)
        if step == 0:
            take(engine)
    engine.close()


@pytest.mark.slow  # test_engine_checkpoints passes damaged ones over without snapshots
def test_damaged_checkpoints_are_named_and_passed_over(memory: Path, tmp_path: Path) -> None:
    run_ranks(1, spoiled_checkpoints, memory, tmp_path)
    newest = tmp_path / "step-4/__0_0.distcp"
    zero_out(newest)
    reason = f"{newest} has been changed: its checksum differs"
    # A snapshot that is whole is older than the newest checkpoint, and serves where that is damaged.
    ((_, begin, _, text),) = run_ranks(1, go_on, memory, 1, tmp_path)
    assert begin == 1 and f"{tmp_path} cannot be loaded (checkpoint step-4 is damaged: {reason}." in text
    shutil.rmtree(memory / "node-0")
    ((_, begin, _, text),) = run_ranks(1, go_on, memory, 1, tmp_path)
    assert begin == 3 and f"step-3, the newest checkpoint that is whole, is loaded: {reason}\n" in text
    shutil.rmtree(memory / "node-0")
    cut(tmp_path / "step-3/zeroengine.json")
    cut(tmp_path / "step-2/zeroengine.json")
    ((_, begin, _, text),) = run_ranks(1, go_on, memory, 1, tmp_path)
    assert begin == 1 and all(f"{tmp_path}/step-{step}/" in text for step in (2, 3, 4))
    cut(tmp_path / "step-1/__0_0.distcp")
    zero_out(*memory.glob("node-0/step-*/__0_*"))
    (text,) = run_ranks(1, refusal, memory, tmp_path)
    assert text.startswith(f"every checkpoint in {tmp_path} is damaged: {reason}; ")
    assert all(f"{tmp_path}/step-{step}/" in text for step in (1, 2, 3))


def refusal(memory: Path, disk: Path) -> str:
    engine = engine_on(memory, 1)
    with pytest.raises(zeroengine.CheckpointError) as error:
        engine.resume(disk)
    return str(error.value)


def fail_once(memory: Path) -> tuple[int | None, list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    engine = engine_on(memory, 2)
    take_steps(engine, range(1))
    take(engine)
    put = module.PeerConnection.put
    if engine.rank == 1:
        module.PeerConnection.put = _refuse  # type: ignore[method-assign]
    take_steps(engine, range(1, 2))
    take(engine)
    found = snapshots_of(engine).find().found
    module.PeerConnection.put = put  # type: ignore[method-assign]
    take_steps(engine, range(2, 3))
    take(engine)
    # Nothing is left of the one that failed. The next one will be written over the files of the first.
    assert not [path.name for path in memory.rglob(".*.writing") if not path.name.startswith(".step-1.")]
    again = snapshots_of(engine).find().found
    engine.close()
    assert again is not None and again.manifest.step == 3
    return found and found.manifest.step, [line for line in lines if "no snapshot" in line]


def _refuse(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_snapshot_that_fails_is_one_warning_and_the_one_before_stays(memory: Path) -> None:
    (step, lines), (other, none) = run_ranks(2, fail_once, memory)
    assert step == other == 1 and len(lines) == 1 and not none
    assert lines[0].startswith("no snapshot of step 2: rank 1 failed to copy a snapshot") and "one before" in lines[0]


def forget(memory: Path) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    engine = engine_on(memory, 1)
    take_steps(engine, range(3))
    return [line for line in lines if "engine.resume" in line]


def test_a_round_that_forgets_to_resume_is_warned_once(memory: Path) -> None:
    assert run_ranks(1, forget, memory) == [[]]
    run_ranks(1, train, memory, 1, 5)
    assert len(run_ranks(1, forget, memory)[0]) == 1


def refused(memory: Path, num_hosts: int, more: dict[str, Any], variables: dict[str, str]) -> str:
    os.environ.update(variables)
    with pytest.raises(zeroengine.ZeroEngineError) as error:
        engine_on(memory, num_hosts, **more)
    return str(error.value)


@pytest.mark.parametrize(
    ("num_hosts", "more", "variables", "message"),
    [
        (1, {"copies": 1}, {}, "snapshots.copies is 1, and all ranks are on one host: write 0"),
        (2, {"copies": 2}, {}, "snapshots.copies is 2, and there are 2 hosts: write 1"),
        (2, {}, {"ZEROENGINE_FREE_HOST_MEMORY": "120KiB"}, r"snapshots take [\d.]+ KiB of memory on node-\d: 2 of its"),
        (1, {"local_steps": {"steps": 2, "replica_ranks": 1}}, {}, "snapshots with local_steps"),
    ],
    ids=["no other host", "too few hosts", "too little memory", "local_steps"],
)
def test_what_cannot_be_kept_is_refused_on_all_ranks(
    memory: Path, num_hosts: int, more: dict[str, Any], variables: dict[str, str], message: str
) -> None:
    for text in run_ranks(2, refused, memory, num_hosts, more, variables):
        assert re.search(message, text)


def without_folder() -> str:
    with pytest.raises(zeroengine.ZeroEngineError) as error:
        engine_at(0, snapshots={"every_seconds": 1})
    return str(error.value)


def test_without_a_folder_the_message_says_what_to_write() -> None:
    assert "start the script with zero-launch, or write" in run_ranks(1, without_folder)[0]


class FailsOnOneRank:
    """An object of the user whose state cannot be had on rank 1."""

    def state_dict(self) -> dict[str, Any]:
        if os.environ["RANK"] == "1":
            raise KeyError("position")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


def train_two(memory: Path, steps: tuple[int, int]) -> list[int]:
    engines = [engine_on(memory, 1) for _ in range(2)]
    resumed = []
    for engine, number in zip(engines, steps, strict=True):
        engine.resume()
        resumed.append(engine.global_steps)
        take_steps(engine, range(number))
        take(engine)
    # Training goes on on both ranks.
    engines[0].register_stateful("loader", FailsOnOneRank())
    take(engines[0])
    for engine in engines:
        engine.close()
    return resumed


def test_two_engines_go_on_each_from_its_own_snapshot(memory: Path) -> None:
    assert run_ranks(2, train_two, memory, (1, 2)) == [[0, 0]] * 2
    assert run_ranks(2, train_two, memory, (0, 0)) == [[1, 2]] * 2
