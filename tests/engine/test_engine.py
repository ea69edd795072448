"""What an engine shows of itself."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import ADAMW, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from zeroengine import ops
from zeroengine.utils.formats import format_byte_size


def attributes() -> None:
    rank = start()
    model = build()
    settings = zeroengine.config.load(config(2, gradient_accumulation_steps=2))
    engine = zeroengine.initialize(model, config=settings, lr_scheduler=torch.optim.lr_scheduler.ConstantLR)
    assert engine.module is model and engine.device == next(model.parameters()).device
    assert (engine.rank, engine.world_size) == (rank, 2)
    assert engine.group.all_gather_object(rank) == [0, 1]
    assert {param for unit in engine.units for param in unit.params} == set(model.parameters())
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    assert engine.base_optimizer.param_groups is engine.optimizer.param_groups
    assert isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.ConstantLR)
    assert engine.config.train_batch_size == 2 * 2 * 2, "resolved"
    assert engine.optimizer.param_groups[0]["betas"] == ADAMW["betas"]
    counts = []
    for step in range(4):
        counts.append((engine.micro_steps, engine.global_steps, engine.is_gradient_accumulation_boundary()))
        loss = engine.forward(*batch(step, rank))
        engine.backward(loss)
        engine.step()
    assert counts == [(0, 0, False), (1, 0, True), (2, 1, False), (3, 1, True)]
    assert isinstance(engine.grad_norm, float) and engine.grad_norm > 0 and engine.skipped_steps == 0


def test_the_engine_shows_what_it_works_with_and_how_far_it_is() -> None:
    run_ranks(2, attributes)


def frameworks(folder: str) -> None:
    """Steps, saves and ends an engine as a framework does that decides by itself when to update."""
    rank = start()
    engine = zeroengine.initialize(build(), config=config(3, gradient_accumulation_steps=2, bf16={"enabled": True}))
    weight = next(engine.module.parameters())
    assert not torch.equal(zeroengine.full_master(weight), zeroengine.full_master(weight).bfloat16().float())
    with mock.patch.object(
        type(engine._parts.partition.placement), "check_intact", side_effect=OSError("disk full") if rank else None
    ):
        with pytest.raises(OSError if rank else zeroengine.ZeroEngineError, match="disk full"):
            engine.round_masters()
    engine.round_masters()
    rounded = zeroengine.full_master(weight)
    with zeroengine.gathered(weight):
        assert torch.equal(rounded, weight.float())
        with pytest.raises(zeroengine.ZeroEngineError, match=r"round_masters\(\) inside `with zeroengine.gathered"):
            engine.round_masters()
    assert (engine.backwards_in_step, engine.loss_scaler.dynamic) == (0, False)
    # A plain backward counts, too.
    engine(*batch(0, rank)).backward()
    assert engine.backwards_in_step == 1 and not engine.is_gradient_accumulation_boundary()
    engine.save_checkpoint(folder, inside_step=True)
    engine.set_gradient_accumulation_boundary(True, override=True)
    assert engine.is_gradient_accumulation_boundary() and engine.step()
    assert (engine.backwards_in_step, engine.global_steps) == (0, 1)
    engine.set_gradient_accumulation_boundary(True, override=True)
    engine.set_gradient_accumulation_boundary(None, override=True)
    engine.backward(engine(*batch(1, rank)))
    assert not engine.step()
    engine.load_checkpoint(folder)
    assert torch.equal(zeroengine.full_master(weight), rounded) and engine.backwards_in_step == 0
    calls: list[str] = []
    engine.call_at_end(calls.append, "first")
    engine.call_at_end(calls.append, "second")
    for _ in range(2):
        engine.close()
    assert calls == ["second", "first"]


def test_a_framework_decides_when_to_update_save_and_clean_up(tmp_path: Path) -> None:
    run_ranks(2, frameworks, str(tmp_path))


def printed() -> tuple[str, list[str]]:
    rank = start()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    settings = config(1, steps_per_print=2, dump_state=True, graph_harvesting=True, monitor={"total_steps": 9})
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine = zeroengine.initialize(build(), config=settings)
        for step in range(5):
            loss = engine(*batch(step, rank))
            engine.backward(loss * (float("nan") if step == 1 else 1.0))
            engine.step()
        engine.close()  # on a GPU nobody has looked at the last step yet
    return out.getvalue(), records


def test_rank_0_prints_its_progress_the_configuration_and_what_it_ignores() -> None:
    (text, records), (other_text, other_records) = run_ranks(2, printed)
    assert other_text == "" and other_records == [], "the other ranks are quiet"
    lines = text.splitlines()
    assert any(line.split()[:2] == ["zero_optimization.stage", "1"] for line in lines)
    assert any(line.split()[:2] == ["train_batch_size", "4"] for line in lines), "the resolved values"
    progress = [line for line in lines if line.startswith("step")]
    assert [line.split(":")[0] for line in progress] == ["step 2/9", "step 4/9"]
    pattern = r": loss of rank 0 \d+\.\d+, lr 0\.003, grad norm \d\.\d+, [\d.]+ (steps/s|s a step)$"
    assert all(re.search(pattern, line) for line in progress), progress
    assert any("graph_harvesting" in record for record in records)
    assert "step 2 skipped: the gradient of tok.weight is not finite" in records, "the first in forward order"


def tables() -> tuple[str, str, str]:
    """``engine.memory()`` as a table, its bytes of states in words, and what ``initialize`` says on stderr."""
    start()
    with contextlib.redirect_stderr(io.StringIO()) as err:
        engine = zeroengine.initialize(build(), config=config(3, bf16={"enabled": True}))
        logging.getLogger("zeroengine").setLevel("WARNING")
        zeroengine.initialize(build(), config=config(3))
    memory = engine.memory()
    assert memory.total == memory.states + memory.buckets + memory.gathered
    assert memory.states == memory.parameters + memory.gradients + memory.master + memory.optimizer
    with zeroengine.gathered(engine.module):
        assert engine.memory().gathered > 0
    names = ("parameters", "gradients", "master", "optimizer")
    return str(memory), ", ".join(f"{n} {format_byte_size(getattr(memory, n))}" for n in names), err.getvalue()


def test_the_memory_prints_as_a_table_and_rank_0_says_it_at_the_start() -> None:
    (table, states, said), (_, _, said_by_other) = run_ranks(2, tables)
    assert said_by_other == ""
    start_lines = [line for line in said.splitlines() if line.startswith("zeroengine ")]
    assert len(start_lines) == 1, "and not where the level of the logger forbids it"
    assert re.search(
        r": TinyLM, [\d.]+ k parameters in \d units, stage 3 over 2 ranks, [\d.]+ KiB a rank: ", start_lines[0]
    )
    assert states in start_lines[0]
    lines = table.splitlines()
    assert lines[0] in ("on cpu", "on cuda:0")
    kernels = ops.kernels_in_use(torch.device(lines[0].removeprefix("on ")))
    assert start_lines[0].endswith(f"; kernels: {kernels}")
    assert [line.split()[0] for line in lines[1:]] == [
        "parameters", "gradients", "master", "optimizer", "buckets", "gathered", "total"
    ]  # fmt: skip
    assert all(line.endswith("MiB") for line in lines[1:])


class Returns(nn.Module):
    """What a model returns is what the engine returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, flag: Any = None) -> dict[str, Any]:
        return {"loss": self.linear(x).sum(), "flag": flag, "module": self}


def returned() -> None:
    start()
    model = Returns()
    engine = zeroengine.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"zero_optimization": {"stage": 3}}
    )
    found = engine(torch.ones(1, 3), flag="kept")
    assert found["flag"] == "kept" and found["module"] is model
    engine.backward(found["loss"])
    assert engine.step() is True


def test_the_engine_passes_arguments_and_results_on() -> None:
    run_ranks(2, returned)
