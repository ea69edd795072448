"""When a rank dies, stalls or goes its own way, the others end with an error that names units and ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.models import WIDTH, TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.test_parameters import Net, Skipping, features
from tests.distributed.training import start
from tests.emulated import cpu_alone, need_transport
from tests.nccl_over_gloo import use_nccl_transport
from tests.parametrization import SHARED_MEMORY_AND_SLOW_GLOO, TRANSPORTS, in_turn
from zeroengine import DivergenceError
from zeroengine.comm.alarm_board import SAME_CALLS_ADVICE
from zeroengine.comm.group import Group
from zeroengine.comm.transports.choose import open_transport

UNIT = r"(blocks\.\d|rest|norm|compare inputs)"  # where the ranks meet, of whose inputs the first three are compared
PATIENCE = 3.0  # seconds: comm.timeout_seconds where the test waits for it
SOON = 30.0  # seconds: well within LONG, with room for a busy machine
LONG = 300.0
EXCHANGE = "all_gather_object() (exchange to save a checkpoint)"


@pytest.fixture(autouse=True)
def shared_memory_is_for_cpus(request: pytest.FixtureRequest) -> None:
    call = getattr(request.node, "callspec", None)
    need_transport(call.params.get("transport", "") if call is not None else "")


def initialize(factory: Callable[[], nn.Module], stage: int, transport: str, timeout: float) -> zeroengine.Engine:
    comm = {"transport": transport, "timeout_seconds": timeout}
    return zeroengine.initialize(build(factory), config=config(stage, comm=comm))


def until_error(run: Callable[[], Any]) -> tuple[str, float]:
    """The message of the DivergenceError that ``run`` ends with, and after how many seconds it came."""
    began = time.monotonic()
    with pytest.raises(DivergenceError) as error:
        run()
    return str(error.value), time.monotonic() - began


# -- a rank dies --------------------------------------------------------------------------------------


def die(rank: int, victim: int, how: str) -> None:
    if rank == victim:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)


def train_until_death(stage: int, transport: str, victim: int, moment: str, how: str) -> tuple[str, float]:
    rank = start()
    engine = initialize(TinyLM, stage, transport, LONG)

    def run() -> None:
        for step in range(20):
            if step == 2 and moment == "forward":
                engine.module.blocks[1].register_forward_pre_hook(lambda *_: die(rank, victim, how))
            if step == 2 and moment == "backward":
                engine.module.blocks[0].up.bias.register_hook(lambda _: die(rank, victim, how))
            loss = engine(*batch(step, rank))
            engine.backward(loss)
            if step == 2 and moment == "step":
                die(rank, victim, how)
            engine.step()

    return until_error(run)


DEATHS = [(3, 1, "forward", "killed"), (2, 2, "backward", "exits"), (0, 1, "step", "killed"), (1, 0, "step", "exits")]


@in_turn(("death", "transport"), [pytest.param(death, id="-".join(map(str, death))) for death in DEATHS], TRANSPORTS)
def test_when_a_rank_dies_the_others_name_it_and_where_they_are(
    death: tuple[int, int, str, str], transport: str
) -> None:
    stage, victim, moment, how = death
    found = run_ranks(3, train_until_death, stage, transport, victim, moment, how, missing=(victim,))
    assert found[victim] is None
    for rank in {0, 1, 2} - {victim}:
        message, seconds = found[rank]
        assert seconds < SOON
        assert re.search(UNIT, message), message
        if transport == "shm":
            assert re.search(r"rank \d has ended", message) and f"rank {victim} (ended)" in message, message
        elif victim:
            assert f"rank {rank} could not finish" in message and f"rank {victim} does not answer" in message, message
        else:
            assert f"rank {rank} could not finish" in message and "hosted by rank 0" in message, message


# -- ranks run different units ------------------------------------------------------------------------


class Chosen(Net):
    """Runs one of its blocks, which are no list, so that no rank gathers what others run."""

    def __init__(self) -> None:
        super().__init__()
        self.no_list = nn.Module()
        for name, block in self.blocks.named_children():
            self.no_list.add_module(name, block)
        del self.blocks

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:  # type: ignore[override]
        return self.loss(self.no_list.get_submodule(str(which))(self.stem(x)))


def run_different_units(transport: str, timeout: float) -> tuple[str, float]:
    rank = start()
    comm = {"transport": transport, "timeout_seconds": timeout}
    engine = zeroengine.initialize(build(Chosen), config=config(3, comm=comm, units=["no_list.*"]))
    engine.backward(engine(*features(0, rank), 1))  # together at first
    engine.step()
    return until_error(lambda: engine(*features(1, rank), 2 * rank))


@pytest.mark.parametrize(
    ("transport", "timeout"), [("shm", LONG), pytest.param("gloo", PATIENCE, marks=pytest.mark.slow)]
)
def test_ranks_that_run_different_units_are_told_which(transport: str, timeout: float) -> None:
    """Through shared memory at once, over Gloo when the time is up."""
    for rank, (message, seconds) in enumerate(run_ranks(2, run_different_units, transport, timeout)):
        assert seconds < SOON
        assert "no_list.0" in message and "no_list.2" in message, message
        assert "rank 0" in message and "rank 1" in message, message
        assert '"units": ["layers.*"]' in message, message
        if transport == "shm":
            assert message.startswith(f"the ranks run different units: rank {rank} is at gather no_list.{2 * rank} ")


def run_forwards_alone(transport: str, timeout: float, part: bool) -> tuple[str, float]:
    rank = start()
    engine = initialize(TinyLM, 3, transport, timeout)

    def train() -> None:
        for step in range(3):
            engine.backward(engine(*batch(step, rank)))
            engine.step()

    def evaluate_on_rank_1() -> None:
        engine.eval()
        with torch.no_grad():
            if rank == 1 and part:
                engine.module.blocks[0](torch.ones(1, WIDTH))
            elif rank == 1:
                engine(*batch(0, rank))
        engine.train()

    train()
    with zeroengine.gathered(engine.module):
        evaluate_on_rank_1()
    train()
    return until_error(lambda: (evaluate_on_rank_1(), train()))


@pytest.mark.parametrize(
    ("transport", "timeout", "part"),
    [pytest.param("shm", LONG, False, marks=pytest.mark.slow), ("gloo", PATIENCE, True)],
)
def test_a_rank_that_evaluates_alone_is_named_except_inside_gathered(
    transport: str, timeout: float, part: bool
) -> None:
    for message, seconds in run_ranks(2, run_forwards_alone, transport, timeout, part):
        assert seconds < SOON
        assert "Rank 1 began 1 more forward without gradients than rank 0. " in message
        assert "`if rank == 0:`" in message and "`with zeroengine.gathered(model):`" in message
        assert "experts" not in message


class Experts(Net):
    """Each rank's data choose one of the blocks, inside a module that every rank calls."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Mixture(self.blocks)
        del self.blocks

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:  # type: ignore[override]
        return self.loss(self.mixture(self.stem(x), which))


class Mixture(nn.Module):
    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.experts[which](x)  # type: ignore[no-any-return]


def route(stage: int) -> list[float]:
    rank = start()
    comm = {"transport": "gloo", "timeout_seconds": PATIENCE}
    engine = zeroengine.initialize(build(Experts), config=config(stage, comm=comm, units=["mixture"]))
    losses = []
    for step in range(4):
        loss = engine(*features(step, rank), (step + 2 * rank) % 3)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_experts_of_one_unit_may_differ_between_ranks_and_train_as_without_partitioning() -> None:
    assert run_ranks(2, route, 3) == run_ranks(2, route, 0)


def scale_differently(transport: str, timeout: float) -> tuple[str, float]:
    rank = start()
    comm, fp16 = {"transport": transport, "timeout_seconds": timeout}, {"enabled": True, "loss_scale": 8}
    engine = zeroengine.initialize(build(TinyLM), config=config(2, comm=comm, fp16=fp16))

    def run() -> None:
        for step in range(2):
            engine.backward(engine(*batch(step, rank)))
            engine.step()
            if rank == 1:
                engine.loss_scale = 16

    return until_error(run)


@SHARED_MEMORY_AND_SLOW_GLOO
def test_ranks_whose_loss_scales_differ_are_told(transport: str) -> None:
    for rank, (message, seconds) in enumerate(run_ranks(2, scale_differently, transport, PATIENCE)):
        assert seconds < SOON and f"loss scale {(8, 16)[rank]}" in message, message


def skip_a_block(stage: int) -> list[float]:
    rank = start()
    engine = initialize(Skipping, stage, "shm", PATIENCE)
    losses = []
    for step in range(4):
        loss = engine(*features(step, rank), step != 1 or rank == 0)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@cpu_alone("shared memory")
def test_at_stage_3_a_rank_may_skip_a_block_of_a_list() -> None:
    assert run_ranks(2, skip_a_block, 3) == run_ranks(2, skip_a_block, 0)


# -- a rank stalls ------------------------------------------------------------------------------------


def stall(stage: int, transport: str, where: str) -> tuple[str, float] | None:
    """Rank 0, which hosts the store, is busy with something else until rank 1 has given up."""
    rank = start()
    engine = initialize(TinyLM, stage, transport, PATIENCE)
    engine.backward(engine(*batch(0, rank)))
    engine.step()
    loss = engine(*batch(1, rank)) if where == "before backward" else None
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        deadline = time.monotonic() + 60
        if where == "saving":
            # The exchange before a save ends when rank 1 has ended.
            with tempfile.TemporaryDirectory() as folder, contextlib.suppress(DivergenceError):
                engine.save_checkpoint(folder)
        while not store.check(["given up"]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return None

    def run() -> None:
        if where == "gathered":
            with zeroengine.gathered(engine.module):
                pass
        for step in range(2):
            engine.backward(engine(*batch(step, rank)) if loss is None or step else loss)
            engine.step()

    found = until_error(run)
    store.set("given up", "1")
    return found


@pytest.mark.parametrize(
    ("stage", "where", "transport"),
    [
        pytest.param(3, "before forward", "gloo", marks=pytest.mark.slow),
        (2, "saving", "shm"),
        pytest.param(1, "before backward", "gloo", marks=pytest.mark.slow),
        pytest.param(0, "gathered", "shm", marks=pytest.mark.slow),
        (0, "gathered", "gloo"),
    ],
)
def test_a_rank_that_stops_is_an_error_after_the_timeout(stage: int, where: str, transport: str) -> None:
    message, seconds = run_ranks(2, stall, stage, transport, where)[1]
    assert PATIENCE * 0.9 < seconds < PATIENCE + SOON
    assert "rank 0" in message and ("gathered" if where == "gathered" else "") in message, message
    assert re.search(UNIT, message), message
    if transport == "shm":
        assert f"rank 1 has waited {PATIENCE:g} s (comm.timeout_seconds) for" in message, message
        assert ("and waits for save_checkpoint() (exchange to save a checkpoint); rank 1" in message) == (
            where == "saving"
        ), message
    else:
        assert "rank 1 could not finish" in message and "rank 0 is at " in message, message


def stall_as_on_a_device(folder: Path) -> None:
    """The transport is NCCL's, whose collectives Gloo stands in for. Whoever waits in one cannot be woken."""
    rank = start()
    with pytest.MonkeyPatch.context() as patch:
        use_nccl_transport(patch)
        engine = initialize(TinyLM, 0, "auto", PATIENCE)
    engine.backward(engine(*batch(0, rank)))
    engine.step()
    deadline = time.monotonic() + 60
    if rank == 0:
        while not (folder / "ends").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.5)
        return
    sys.stderr = (folder / "said").open("w")
    with mock.patch.object(os, "_exit", lambda code: ((folder / "ends").touch(), os.kill(os.getpid(), signal.SIGKILL))):
        engine.backward(engine(*batch(1, rank)))
        engine.step()


@cpu_alone("Gloo stands in for NCCL")
def test_a_rank_that_waits_for_its_device_is_ended_with_the_same_words(tmp_path: Path) -> None:
    began = time.monotonic()
    run_ranks(2, stall_as_on_a_device, tmp_path, missing=(1,))
    assert PATIENCE < time.monotonic() - began < PATIENCE + SOON
    *stack, last = (tmp_path / "said").read_text().splitlines()
    assert re.fullmatch(
        r"zeroengine.errors.DivergenceError: rank 1 has waited 3 s \(comm.timeout_seconds\) for reduce (\S+) \(number "
        r"(\d+)\): rank 0 is at .* \(number \d+\), rank 1 waits at reduce \1 \(number \2\)\. "
        r"Rank 1 began 1 more forward with gradients than rank 0\. Every rank must make the same calls: .*",
        last,
    ), last
    assert any("engine.step()" in line for line in stack), stack


# -- waits that may be long ---------------------------------------------------------------------------


def meet(folder: Path, suspended: bool) -> tuple[list[int], list[str]] | None:
    """Rank 1 comes late to an exchange, or never."""
    start()
    group = Group(None, torch.device("cpu"))
    transport = open_transport(group, "gloo", 1.0)
    said: list[str] = []
    logging.getLogger("zeroengine").addFilter(lambda record: said.append(record.getMessage()) or True)
    if group.rank == 1:
        (folder / "pid").write_text(str(os.getpid()))
        if suspended:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(4.0)
    sys.stderr = (folder / f"said{group.rank}").open("w")

    def end(code: int) -> None:
        (folder / "code").write_text(str(code))
        for pid in (int((folder / "pid").read_text()), os.getpid()):
            os.kill(pid, signal.SIGKILL)

    with mock.patch.object(os, "_exit", end):
        values = group.all_gather_object(group.rank, "to save a checkpoint")
    transport.close()
    return values, said


def test_a_rank_that_is_busy_is_waited_for_and_that_is_said_once(tmp_path: Path) -> None:
    (values, said), *others = run_ranks(3, meet, tmp_path, False)
    assert values == [0, 1, 2] and others == [([0, 1, 2], [])] * 2
    assert said == [
        f"rank 0 has waited 1 s (comm.timeout_seconds) for {EXCHANGE}, and goes on waiting: rank 1 is at its start, "
        f"the others wait at {EXCHANGE}. {SAME_CALLS_ADVICE}"
    ]


def test_a_rank_that_does_not_answer_ends_the_wait(tmp_path: Path) -> None:
    run_ranks(2, meet, tmp_path, True, missing=(0, 1))
    assert (tmp_path / "code").read_text() == "1"
    assert (tmp_path / "said0").read_text().splitlines()[-1] == (
        f"zeroengine.errors.DivergenceError: rank 0 has waited 1 s (comm.timeout_seconds) for {EXCHANGE}: rank 1 does "
        f"not answer (ended?), rank 0 waits at {EXCHANGE}. "
        f"{SAME_CALLS_ADVICE}."
    )
