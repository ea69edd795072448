"""The section ``flops_profiler``: parameters, operations and time of one forward by module."""

from __future__ import annotations

import contextlib
import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import VOCAB, WIDTH, Block, TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import wanted
from zeroengine.config.sinks import FlopsProfile
from zeroengine.monitor.forward_profile import ForwardProfiler
from zeroengine.monitor.profile_table import ProfiledRank

STEPS = 5
TOKENS = 2 * 8  # of a micro-step of ``batch``
SLEEP_S = 0.05


class SleepingLM(TinyLM):
    """A model whose second block is slow."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S))


def train(stage: int, section: dict[str, Any], more: dict[str, Any]) -> tuple[list[float], list[str]]:
    """Return this rank's losses, and what was printed in each step."""
    rank = start()
    losses, printed = [], []
    settings = config(stage, flops_profiler=section, units=["blocks.*"], **more)
    engine = zeroengine.initialize(build(SleepingLM), config=settings)
    num_hooks = {(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in engine.module.modules()}
    for step in range(STEPS):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            loss = engine(*batch(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        printed.append(out.getvalue())
    numbers = {(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in engine.module.modules()}
    engine.close()
    assert numbers == num_hooks, "the hooks of the profile are gone"
    return losses, printed


def rows(table: str) -> dict[str, list[str]]:
    """The cells of the detailed table by the name of the module as it is printed."""
    _, _, detailed = table.partition("  module")
    return {line.split()[0]: line.split()[1:] for line in detailed.splitlines()[1:-1]}


@pytest.mark.parametrize("stage, more", [(3, {}), (0, {"monitor": {"enabled": True, "peak_flops": 1e12}})])
def test_the_table_has_the_operations_of_the_formula_and_the_time_of_the_slow_module(
    stage: int, more: dict[str, Any]
) -> None:
    (losses, printed), (losses_of_other, printed_by_other) = run_ranks(
        2, train, stage, {"enabled": True, "profile_step": 2}, more
    )
    assert not any(printed_by_other) and sum(map(bool, printed)) == 1
    # Where the monitor counts operations the next forward is timed.
    table = next(filter(None, printed))
    assert printed.index(table) == 2
    assert table.startswith("forward after 2 steps, on rank 0 of 2, 2 samples in a micro-batch:")
    by_name = rows(table)
    block = 2 * TOKENS * 2 * WIDTH * 3 * WIDTH
    head = 2 * TOKENS * WIDTH * VOCAB
    assert f"{(3 * block + head) / 1e3:.3g} k FLOP" in table and f"{2 * (3 * block + head) / 1e3:.3g} k FLOP" in table
    # class, parameters, k, share, FLOPs, k, share, time, ms, share, rate, prefix, MFU
    assert by_name["up"][4:6] == [f"{block / 2 / 1e3:.3g}", "k"]
    assert [name for name in by_name if name.endswith("*")] == ["0*", "1*", "2*"]
    # The hook that sleeps runs before that of the profile in its own module, and within the model.
    # All events of an emulated GPU are a millisecond apart.
    assert float(by_name["model"][7]) >= (1 if wanted() == "emulated" else 1000 * SLEEP_S)
    plain = [answer[0] for answer in run_ranks(2, train, stage, {}, {})]
    assert [losses, losses_of_other] == plain
    assert (by_name["up"][-1] == "-") == (not more)


def test_the_summary_shows_the_classes_that_take_most_time_and_a_file_takes_the_table(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "a.txt"
    section = {
        "enabled": True,
        "profile_step": 0,
        "module_depth": 2,
        "top_modules": 2,
        "detailed": False,
        "output_file": str(path),
        "recompute_fwd_factor": 1.0,
    }
    ((_, printed),) = run_ranks(1, train, 0, section, {})
    assert not any(printed)
    _, facts, head, *lines = path.read_text().splitlines()
    forward, backward = (float(number) for number in re.findall(r"([\d.]+) [kM] FLOP", facts))
    assert "M FLOP" in facts and backward * 1e6 == pytest.approx(3 * forward * 1e3, rel=0.01)
    assert head.split()[:3] == ["depth", "class", "parameters"]
    assert lines[0].split()[:2] == ["0", "SleepingLM"]
    assert [line.split()[0] for line in lines] == ["0", "1", "1", "2"]
    assert lines[-1].split()[1:4] == ["Block", "x", "3"]


def test_a_file_that_cannot_be_written_costs_a_warning_and_the_table_is_printed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    section = {"enabled": True, "profile_step": 0, "output_file": str(tmp_path / "file" / "a.txt")}
    ((_, printed),) = run_ranks(1, train, 0, section, {})
    assert [bool(text) for text in printed] == [False, True, False, False, False]


def time_compiled(module: nn.Module) -> tuple[str, list[str]]:
    """Profile two forwards of a module by hand."""
    rank = ProfiledRank(1, 1, None)
    profiler = ForwardProfiler(module, FlopsProfile(enabled=True), (), rank, torch.device("cpu"))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for step in (0, 1):
            with profiler.observe(step):
                module(torch.ones(1, 2))
    return out.getvalue(), list(profiler._modules)


def test_compiled_parts_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Block(2))
    # The backend only notes that it is compiled: hooks of a profile would compile it again.
    compilations = []

    def note(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph

    model[1].compile(backend=note)
    printed, names = time_compiled(model)
    assert names == ["", "0"] and len(compilations) == 1
    assert "no operations are counted" in printed
    model.compile(backend=note)
    assert time_compiled(model) == ("", [])
    (warning,) = (entry.getMessage() for entry in caplog.records if entry.name == "zeroengine")
    assert "the whole model is compiled" in warning
