"""Loggers and printers of runs on several ranks."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroengine
from tests.distributed.models import batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from zeroengine.monitor.sinks.csv_files import CSVSink

STEPS = 12
BAD_STEP = 3


def train(settings: dict[str, Any], failing: bool = False) -> tuple[list[float], str, list[str]]:
    """Return the losses of this rank, what it printed, and its warnings."""
    rank = start()
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda entry: warnings.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    if failing:
        take_step = CSVSink.step

        def fill_disk(sink: CSVSink, record: Any) -> None:
            take_step(sink, record)
            if record.step == BAD_STEP:
                raise OSError(28, "No space left on device")

        CSVSink.step = fill_disk  # type: ignore[method-assign]
    losses = []
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine = zeroengine.initialize(build(), config=config(3, **settings))
        for step in range(STEPS):
            loss = engine(*batch(step, rank))
            engine.backward(loss)
            engine.log(before=step, rank=rank)
            engine.step()
            # A metric of an evaluation after the step belongs to the step, too.
            engine.log(twice=2 * torch.tensor(step))
            losses.append(loss.item())
        engine.close()
    return losses, out.getvalue(), warnings


@functools.cache
def plain_losses() -> list[list[float]]:
    """Call it in a test: on an emulated GPU, fixtures of tests choose its kernels."""
    return [losses for losses, _, _ in run_ranks(2, train, {})]


def test_csv_files_and_tables_have_every_step_and_the_losses_stay(tmp_path: Path) -> None:
    settings = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "a"},
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "timers": {"throughput": {"enabled": True}},
        "steps_per_print": 4,
    }
    answers = run_ranks(2, train, settings)
    assert [losses for losses, _, _ in answers] == plain_losses()
    with (tmp_path / "a" / "Train_Samples_train_loss.csv").open() as file:
        _, *rows = csv.reader(file)
    mean = [sum(losses) / 2 for losses in zip(*plain_losses(), strict=True)]
    # A step of two ranks has two samples on each.
    assert [int(row[0]) for row in rows] == [4 * step for step in range(1, STEPS + 1)]
    assert [float(row[1]) for row in rows] == pytest.approx(mean)
    for name, factor in (("before", 1), ("twice", 2)):
        with (tmp_path / "a" / f"{name}.csv").open() as file:
            assert [float(row[1]) for row in list(csv.reader(file))[1:]] == [factor * step for step in range(STEPS)]
    (_, printed, _), (_, printed_by_other, _) = answers
    assert printed_by_other == ""
    heads = [line for line in printed.splitlines() if line.startswith("step ")]
    for step in (4, 8, 12):
        of_step = [head for head in heads if head.startswith(f"step {step}:")]
        assert len(of_step) == 4, "progress, rate, split and memory"
        assert any(f"loss {mean[step - 1]:.4f}, " in head and " tokens/s" in head for head in of_step)


def test_a_full_disk_ends_the_logger_and_not_the_training(tmp_path: Path) -> None:
    settings = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "a"},
        "monitor": {"folder": str(tmp_path / "run")},
    }
    answers = run_ranks(2, train, settings, True)
    assert [losses for losses, _, _ in answers] == plain_losses()
    assert len((tmp_path / "a" / "Train_Samples_lr.csv").read_text().splitlines()) == 1 + BAD_STEP
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == STEPS
    (_, _, warnings), (_, _, others) = answers
    assert len([text for text in warnings if "csv_monitor failed" in text]) == 1
    assert not any("csv_monitor" in text for text in others)


def test_loggers_without_the_monitor_get_nothing_and_say_so(tmp_path: Path) -> None:
    settings = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path)}, "monitor": {"enabled": False}}
    ((_, _, warnings),) = run_ranks(1, train, settings)
    assert any('"monitor": {"enabled": false} leaves' in text for text in warnings)
    assert not list(tmp_path.iterdir())
