"""The section ``comms_logger``: what collectives of a run are counted, timed and printed."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.conftest import ROOT
from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.models import batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import cpu_alone, gpu
from zeroengine.comm.comms_log import OperationTotals
from zeroengine.comm.logged_transport import log_collectives
from zeroengine.comm.transports.nccl import NCCLTransport
from zeroengine.comm.transports.single_process import SingleProcessChannel, SingleProcessTransport
from zeroengine.config.sinks import CommsLogger
from zeroengine.utils.work import Work

STEPS = 4
DELAY_S = 0.1
Totals = dict[tuple[str, str], OperationTotals]


def train(stage: int, section: dict[str, Any], delay_s: float = 0.0) -> tuple[list[float], str, Totals, dict[str, int]]:
    """Return this rank's losses, what it printed, what it logged, and the bytes of each unit's full buffer."""
    rank = start()
    losses = []
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine = zeroengine.initialize(build(), config=config(stage, comms_logger=section))
        parts = engine._parts
        for step in range(STEPS):
            # The other rank is late to each of its collectives.
            time.sleep(delay_s * rank)
            loss = engine(*batch(step, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        nbytes = {unit.name: 4 * unit.layout.numel for unit in parts.partition.units}
        engine.close()
        recorder = getattr(parts.ranks.transport, "_recorder", None)
    return losses, out.getvalue(), dict(recorder._log.totals) if recorder else {}, nbytes


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow), 3])
def test_counts_and_bytes_are_those_of_the_stage_and_the_losses_stay(stage: int) -> None:
    plain = [losses for losses, *_ in run_ranks(2, train, stage, {})]
    answers = run_ranks(2, train, stage, {"enabled": True})
    assert [losses for losses, *_ in answers] == plain
    (_, printed, totals, nbytes), (_, printed_by_other, totals_of_other, _) = answers
    assert printed_by_other == "" and totals_of_other == {}
    reduction = "all_reduce" if stage == 0 else "reduce_scatter"
    for unit, size in nbytes.items():
        reduced = totals[reduction, unit]
        assert (reduced.count, reduced.nbytes) == (STEPS, STEPS * size)
        assert 0 < reduced.exposed_seconds <= reduced.seconds
        if stage:
            gathered = totals["all_gather", unit]
            # Nobody reads the update of the last step at stage 2, so nobody gathers it. Stage 3 gathers at least once a
            # step.
            assert gathered.count >= {2: STEPS - 1, 3: STEPS}[stage] and gathered.nbytes == gathered.count * size
        else:
            assert ("all_gather", unit) not in totals
        assert [reduction, unit, str(STEPS)] in [line.split()[:3] for line in printed.splitlines()]
    assert printed.startswith("collectives of rank 0 of 2:\n")


def test_the_time_that_a_late_rank_costs_is_exposed() -> None:
    (_, _, totals, _), _ = run_ranks(2, train, 3, {"enabled": True}, DELAY_S)
    assert sum(collectives.exposed_seconds for collectives in totals.values()) > 0.8 * STEPS * DELAY_S
    assert sum(collectives.seconds for collectives in totals.values()) > 0.8 * STEPS * DELAY_S


class SlowToIssue(SingleProcessChannel):
    """A channel whose collectives are over when they are issued, which takes a while."""

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        time.sleep(DELAY_S)
        return super().all_reduce(full, label)


def test_the_time_to_issue_a_collective_is_exposed() -> None:
    inner = SingleProcessTransport(torch.device("cpu"))
    inner.reduce = SlowToIssue()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.ExitStack() as undo:
        transport = log_collectives(inner, CommsLogger(enabled=True), undo)
        transport.reduce.all_reduce(torch.ones(1), "blocks.0").wait_host()
    assert float(out.getvalue().split("this rank spent ")[1].split(" s ")[0]) >= 0.9 * DELAY_S


def test_each_collective_may_have_a_line() -> None:
    (_, printed, totals, nbytes), _ = run_ranks(2, train, 2, {"enabled": True, "verbose": True})
    lines = [line for line in printed.split("collectives of rank 0")[0].splitlines()]
    assert len(lines) == sum(collectives.count for collectives in totals.values())
    assert sum(line.startswith("reduce_scatter ") for line in lines) == STEPS * len(nbytes)


@pytest.mark.slow
def test_a_script_that_leaves_its_engine_open_prints_the_table(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, zeroengine\n"
        "settings = {'comms_logger': {'enabled': True}, 'optimizer': {'type': 'AdamW'}}\n"
        "engine = zeroengine.initialize(torch.nn.Linear(2, 2), config=settings)\n"
        "engine.backward(engine(torch.ones(1, 2)).sum())\n"
        "engine.step()\n"
    )
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "collectives of rank 0 of 1:" in done.stdout and "all_reduce" in done.stdout


def accumulate() -> tuple[list[float], list[float], int]:
    """A sum that is added to its target, on NCCL's transport over Gloo, with events of an emulated GPU."""
    dist.init_process_group("gloo")
    groups = [dist.new_group(), dist.new_group()]
    cuda = {name: getattr(gpu, name) for name in ("Event", "Stream", "stream")}
    with mock.patch.multiple(torch.cuda, **cuda, is_current_stream_capturing=lambda: False):
        with contextlib.ExitStack() as undo, contextlib.redirect_stdout(io.StringIO()):
            inner = NCCLTransport(*groups, torch.device("cpu"), None)
            transport = log_collectives(inner, CommsLogger(enabled=True), undo)
            shard, full = torch.ones(2), torch.full((4,), 3.0)
            work = transport.reduce.reduce_scatter(shard, full, "blocks.0", accumulate=True)
            before = shard.tolist()
            work.wait_stream()
            work.wait_stream()
            recorder: Any = transport._recorder  # type: ignore[attr-defined]
            return before, shard.tolist(), recorder._log.totals["reduce_scatter", "blocks.0"].count


@cpu_alone("the events of the emulated GPU are patched in")
def test_on_nccl_the_stream_that_awaits_a_sum_adds_it_and_once() -> None:
    for before, after, count in run_ranks(2, accumulate):
        assert (before, after, count) == ([1.0, 1.0], [7.0, 7.0], 1)


def train_across_hosts(section: dict[str, Any]) -> list[float]:
    """Degrees of 2 on hosts of 3 ranks, where the transport chooses other channels once it knows the degrees."""
    start()
    imagine_hosts(3)
    settings = config(0, comms_logger=section)
    settings["zero_optimization"] = {"degrees": {"parameters": 2}, "param_persistence_threshold": 0}
    engine = zeroengine.initialize(build(), config=settings)
    losses = []
    with contextlib.redirect_stdout(io.StringIO()):
        for step in range(2):
            loss = engine(*batch(step, engine.rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.close()
    return losses


@pytest.mark.slow
def test_a_log_follows_the_channels_that_the_transport_chooses_by_the_degrees() -> None:
    assert run_ranks(6, train_across_hosts, {"enabled": True}) == run_ranks(6, train_across_hosts, {})
