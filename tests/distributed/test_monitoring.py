"""What the monitor records of real ranks is where their time went."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.conftest import ROOT
from tests.distributed.models import batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import take_steps
from tests.emulated import cpu_alone
from tests.launch.processes import wait_for
from zeroengine.comm.transports.gloo import GlooChannel, GlooWork
from zeroengine.disk.queue import Transfer
from zeroengine.launch.local import worker
from zeroengine.launch.local.worker import FAILURE_FILE_VARIABLE
from zeroengine.monitor import collector
from zeroengine.monitor.record import KINDS, SPLIT

STEPS = 6
DELAY_S = 0.05


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def to_disk(path: Path) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(path)}
    return {"zero_optimization": {"offload_optimizer": place, "offload_param": place}}


def make_engine(stage: int, folder: Path, more: dict[str, Any]) -> zeroengine.Engine:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return zeroengine.initialize(build(), None, config(stage, monitor={"folder": str(folder)}, **more))


def timed_steps(stage: int, folder: Path, more: dict[str, Any]) -> tuple[float, list[float]]:
    """The seconds from the end of the second step to the end of the last one, and the losses."""
    engine = make_engine(stage, folder, more)
    losses, ends = [], []
    while len(ends) < STEPS:
        loss = engine(*batch(len(losses), engine.rank))
        time.sleep(DELAY_S)
        engine.backward(loss)
        losses.append(loss.item())
        before = engine.micro_steps
        if engine.is_gradient_accumulation_boundary():
            engine.step()
            ends.append(time.perf_counter())
        else:
            engine.step()
        assert engine.micro_steps == before + 1
    engine.close()
    return ends[-1] - ends[1], losses


@pytest.mark.parametrize(
    "stage, accumulation, on_disk",
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 1, False), (2, 1, False), (3, 2, False))),
        (1, 2, False),
        (3, 1, True),
    ],
)
def test_the_split_adds_up_to_the_wall_time_within_three_percent(
    tmp_path: Path, stage: int, accumulation: int, on_disk: bool
) -> None:
    more = {"gradient_accumulation_steps": accumulation, **(to_disk(tmp_path) if on_disk else {})}
    answers = run_ranks(2, timed_steps, stage, tmp_path / "run", more)
    records = read(tmp_path / "run", "steps.jsonl")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    wall = sum(seconds for seconds, _ in answers) / 2
    split = {kind: sum(record["split"][kind] for record in records[2:]) for kind in SPLIT}
    assert sum(split.values()) == pytest.approx(wall, rel=0.03)
    # The loop sleeps between forward and backward, so that time is no work of the engine.
    assert split["other"] > 0.9 * (STEPS - 2) * accumulation * DELAY_S
    assert all(split[kind] > 0 for kind in ("forward", "backward", "reduce", "update"))
    per_unit = [sum(record["units"]["gather"]) for record in records]
    assert (sum(per_unit) > 0) == (stage > 0) and (split["offload"] > 0) == on_disk
    assert all(unit <= record["split"]["gather"] + 1e-9 for unit, record in zip(per_unit, records, strict=True))
    losses = [sum(losses) / 2 for losses in zip(*(losses for _, losses in answers), strict=True)]
    means = [sum(losses[first : first + accumulation]) / accumulation for first in range(0, len(losses), accumulation)]
    assert [record["loss"] for record in records] == pytest.approx(means)
    assert {record["samples"] for record in records} == {4 * accumulation}
    assert {record["tokens"] for record in records} == {32 * accumulation}


# -- which rank is slow, and why ------------------------------------------------------------------


class Sleepy(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        time.sleep(DELAY_S)
        return self.inner(*args)


def slow_forward(folder: Path, scratch: Path) -> None:
    dist.init_process_group("gloo")
    inner = build()
    # Every rank has the same modules; the others do not sleep.
    model = Sleepy(inner)
    if dist.get_rank() != 1:
        model.forward = inner.forward  # type: ignore[method-assign]
    engine = zeroengine.initialize(model, None, config(2, monitor={"folder": str(folder)}))
    take_steps(engine, range(STEPS))
    engine.close()


def slow_loader(folder: Path, scratch: Path) -> None:
    engine = make_engine(3, folder, {})
    for number in range(STEPS):
        time.sleep(DELAY_S * (engine.rank == 1))
        take_steps(engine, range(number, number + 1))
    engine.close()


def slow_disk(folder: Path, scratch: Path) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        wait_host = Transfer.wait_host

        def late(transfer: Transfer) -> None:
            time.sleep(DELAY_S / 5)
            wait_host(transfer)

        Transfer.wait_host = late  # type: ignore[method-assign]
    engine = make_engine(3, folder, to_disk(scratch))
    take_steps(engine, range(STEPS))
    engine.close()


@cpu_alone("a GPU's timeline of ranks that sleep on the host is another one")
@pytest.mark.parametrize("train, cause", [(slow_forward, "compute"), (slow_loader, "other"), (slow_disk, "offload")])
def test_a_slow_rank_is_named_with_its_cause(tmp_path: Path, train: Callable[[Path, Path], None], cause: str) -> None:
    run_ranks(2, train, tmp_path / "run", tmp_path)
    records = [record for record in read(tmp_path / "run", "steps.jsonl")[1:] if record["slowest"]]
    # Other processes on this machine may hold up the other rank in some steps, or both ranks alike.
    own = [record for record in records if record["slowest"]["cause"] != "link"]
    named = Counter((record["slowest"]["rank"], record["slowest"]["cause"]) for record in own)
    assert named[1, cause] == max(named.values(), default=1), records
    for record in own:
        ranks, found = record["ranks"], record["slowest"]
        busy = [ranks["compute"][rank] + ranks["offload"][rank] + ranks["other"][rank] for rank in range(2)]
        assert found["seconds"] == pytest.approx(busy[found["rank"]] - busy[1 - found["rank"]], abs=1e-6)
        if found["rank"] == 1 and found["cause"] == cause:
            assert ranks[cause][1] >= DELAY_S


def train_over_gloo(folder: Path, delay: float = 0.0) -> float:
    """Return the seconds that this rank's messages were late in all."""
    slept = [0.0]
    if delay and os.environ["RANK"] == "1":
        exchange = GlooChannel.exchange

        def late(channel: GlooChannel, *arguments: Any, **more: Any) -> GlooWork:
            begin = time.perf_counter()
            time.sleep(delay)
            slept[0] += time.perf_counter() - begin
            return exchange(channel, *arguments, **more)

        GlooChannel.exchange = late  # type: ignore[method-assign]
    engine = make_engine(2, folder, {"comm": {"transport": "gloo"}})
    slept[0] = 0.0
    take_steps(engine, range(STEPS))
    engine.close()
    return slept[0]


SLOW_LINK = """
import sys
from pathlib import Path
from tests.distributed.ranks import run_ranks
from tests.distributed.test_monitoring import train_over_gloo
if __name__ == "__main__":
    run_ranks(2, train_over_gloo, Path(sys.argv[1]))
"""
# In a network of its own, whose packets wait: 57 kB of gradients take 0.1 s or more at this rate.
SHAPED = "ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate 8mbit burst 16kb limit 4mb && exec "


@cpu_alone("Gloo moves the bytes")
def test_late_messages_are_a_slow_link_and_the_waits_of_both_ranks_explain_the_delay(tmp_path: Path) -> None:
    delay = run_ranks(2, train_over_gloo, tmp_path, DELAY_S / 2)[1]
    records = read(tmp_path, "steps.jsonl")
    causes = [record["slowest"]["cause"] for record in records[1:] if record["slowest"]]
    assert causes.count("link") >= len(records) - 2, records
    for rank in range(2):
        assert sum(record["ranks"]["wait"][rank] for record in records) >= 0.9 * delay > 10 * DELAY_S


@pytest.mark.slow
@cpu_alone("Gloo moves the bytes")
@pytest.mark.skipif(
    not shutil.which("tc")
    or subprocess.run(["unshare", "-n", "sh", "-c", SHAPED + "true"], capture_output=True).returncode,
    reason="a network cannot be made and shaped here",
)
def test_a_slow_link_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SLOW_LINK)
    command = f"{SHAPED} {sys.executable} {script} {tmp_path / 'run'}"
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", command],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    slowest = [record["slowest"] for record in read(tmp_path / "run", "steps.jsonl")[1:]]
    assert [found["cause"] for found in slowest if found].count("link") >= len(slowest) - 1, slowest
    assert "MB/s" in slowest[-1]["text"]


# -- events, the user's numbers, failures ---------------------------------------------------------


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("zeroengine").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train_with_events(folder: Path) -> None:
    engine = make_engine(3, folder, {})
    take_steps(engine, range(2))
    engine.log(accuracy=0.5, score=torch.tensor(3.0))
    loss = engine(*batch(2, engine.rank))
    engine.backward(loss * float("inf"))
    engine.step()
    engine.save_checkpoint(folder / "checkpoints")
    engine.load_checkpoint(folder / "checkpoints")
    take_steps(engine, range(3, 4))
    with pytest.raises(zeroengine.ZeroEngineError, match=r"log\(\): name is str; write a number"):
        engine.log(name="text")  # type: ignore[arg-type]
    engine.close()


def test_events_name_what_happened_and_the_users_numbers_belong_to_their_step(tmp_path: Path) -> None:
    run_ranks(2, train_with_events, tmp_path)
    records, events = read(tmp_path, "steps.jsonl"), read(tmp_path, "events.jsonl")
    assert [event["kind"] for event in events] == ["start", "skip", "checkpoint", "resume", "end"]
    assert [record["skipped"] for record in records] == [False, False, True, False]
    assert records[1]["user"] == {"accuracy": 0.5, "score": 3.0}
    assert records[2]["grad_norm"] is None and not records[2]["user"] and not records[3]["user"]
    assert records[3]["split"]["checkpoint"] > 0
    skip, saved = events[1], events[2]
    names = [name for name, _ in build().named_parameters()]
    assert skip["step"] == 3 and any(name in skip["text"] for name in names)
    assert saved["bytes"] > 0 and 0 < saved["seconds"] < 60
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["world_size"] == len(run["hosts"]) == 2 and run["model"]["class"] == "TinyLM"


def train_until_a_rank_ends(folder: Path) -> tuple[float, list[str]] | None:
    warnings = Warnings()
    engine = make_engine(0, folder, {})
    take_steps(engine, range(2))
    if engine.rank == 1:
        # A step is recorded once all ranks have sent theirs, beside training: not before this rank may end.
        wait_for(lambda: bool(read(folder, "steps.jsonl")), 20)
        os._exit(0)
    begin = time.perf_counter()
    with contextlib.suppress(Exception):
        # The peers are gone, so this raises, and the engine is ended after an error.
        try:
            take_steps(engine, range(2, 4))
        finally:
            engine.close()
    return time.perf_counter() - begin, warnings.texts


def test_a_rank_that_ends_does_not_hang_the_end_of_the_others(tmp_path: Path) -> None:
    more = run_ranks(2, train_until_a_rank_ends, tmp_path, missing=(1,))
    assert more[0] is not None
    seconds, texts = more[0]
    assert seconds < 30
    assert sum("recorded" in text for text in texts) <= 1
    events = read(tmp_path, "events.jsonl")
    assert events[-1]["kind"] == "error" and len(read(tmp_path, "steps.jsonl")) >= 1


def train_beside_a_stalled_monitor(folder: Path) -> tuple[float, list[str]]:
    collector.CLOSE_TIMEOUT_S = 0.5
    warnings = Warnings()
    engine = make_engine(0, folder, {})
    if engine.rank == 1:
        # The thread that takes part in the gathers never comes back from the first one.
        collector.Collector._take_step = lambda *_: threading.Event().wait()  # type: ignore[method-assign, return-value]
    take_steps(engine, range(3))
    begin = time.perf_counter()
    engine.close()
    return time.perf_counter() - begin, warnings.texts


def test_a_stalled_gather_costs_the_end_a_bounded_wait_and_one_warning(tmp_path: Path) -> None:
    (seconds, warnings), (other_seconds, other_warnings) = run_ranks(2, train_beside_a_stalled_monitor, tmp_path)
    assert 0.4 < seconds < 15 and 0.4 < other_seconds < 15
    assert len(warnings) == 1 and "not recorded" in warnings[0] and not other_warnings
    assert read(tmp_path, "events.jsonl")[-1]["kind"] == "end" and not read(tmp_path, "steps.jsonl")


def train_and_exit(folder: Path) -> None:
    engine = make_engine(0, folder, {})
    take_steps(engine, range(2))
    # ``run_ranks`` ends its processes without Python's exit, which runs this otherwise.
    engine._parts.reports.monitor._finalizer()  # type: ignore[union-attr]


def test_a_run_that_never_closes_its_engine_has_all_records_and_an_end(tmp_path: Path) -> None:
    run_ranks(2, train_and_exit, tmp_path)
    assert len(read(tmp_path, "steps.jsonl")) == 2 and read(tmp_path, "events.jsonl")[-1]["kind"] == "end"


FAILING = """
import sys
import zeroengine
from tests.distributed.models import batch, build, config
engine = zeroengine.initialize(build(), None, config(0, monitor={"folder": sys.argv[1]}))
engine.backward(engine(*batch(0, 0)))
engine.step()
raise RuntimeError("on purpose")
"""


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param((), id="python", marks=pytest.mark.slow),
        pytest.param((str(Path(worker.__file__)),), id="zero-launch"),
    ],
)
def test_a_script_that_fails_ends_its_run_with_the_error(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    done = subprocess.run(
        [sys.executable, *launcher, script, tmp_path / "run"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), FAILURE_FILE_VARIABLE: str(tmp_path / "failure")},
    )
    assert done.returncode == 1, done.stderr
    last = read(tmp_path / "run", "events.jsonl")[-1]
    assert (last["kind"], last["step"]) == ("error", 1) and "RuntimeError: on purpose" in last["text"]
    assert len(read(tmp_path / "run", "steps.jsonl")) == 1


def losses_with(monitor: dict[str, Any], stage: int) -> list[float]:
    dist.init_process_group("gloo")
    engine = zeroengine.initialize(build(), None, config(stage, monitor=monitor))
    losses = take_steps(engine, range(4))
    engine.close()
    return losses


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_the_monitor_changes_no_bit_of_the_losses(tmp_path: Path, stage: int) -> None:
    assert run_ranks(2, losses_with, {"folder": str(tmp_path)}, stage) == run_ranks(2, losses_with, {}, stage)


def plain_loop(folder: Path) -> None:
    engine = make_engine(2, folder, {})
    for number in range(3):
        engine(*batch(number, engine.rank)).backward()
        engine.optimizer.step()
    engine.close()


def test_a_plain_loop_is_timed_as_well_and_its_loss_is_unknown(tmp_path: Path) -> None:
    run_ranks(2, plain_loop, tmp_path)
    records = read(tmp_path, "steps.jsonl")
    assert [record["loss"] for record in records] == [None] * 3
    assert all(record["split"]["backward"] > 0 and record["split"]["forward"] > 0 for record in records)
    assert set(records[0]["split"]) == {*KINDS, "other"}


def test_ranks_that_disagree_about_the_run_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match=r"monitor\.folder .* cannot be written"):
        run_ranks(2, losses_with, {"folder": str(tmp_path / "file" / "run")}, 0)
