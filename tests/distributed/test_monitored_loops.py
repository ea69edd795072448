"""What the monitor records of loops that do more than forward, backward and step."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start, take_steps
from zeroengine import DivergenceError, ZeroEngineError
from zeroengine.monitor.record import StepRecord
from zeroengine.view.step_group import StepGroup


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def make_engine(folder: Path, model: nn.Module | None = None, **more: Any) -> zeroengine.Engine:
    start()
    return zeroengine.initialize(model or build(), None, config(3, monitor={"folder": str(folder)}, **more))


class Fault(Exception):
    pass


def fail(*_: Any) -> None:
    raise Fault


def retried(folder: Path) -> list[float]:
    engine = make_engine(folder)
    losses = []
    for number in range(3):
        handle = engine.module.norm.register_forward_hook(fail)
        with pytest.raises(Fault):
            engine(*batch(number, 0))
        handle.remove()
        loss = engine(*batch(number, 0))
        loss.register_hook(fail)
        with pytest.raises(Fault):
            engine.backward(loss)
        # The next forward ends that backward, and so does zero_grad().
        if number:
            engine.zero_grad()
        losses += take_steps(engine, range(number, number + 1))
    engine.close()
    return losses


def test_a_forward_or_backward_that_raised_is_no_part_of_the_step(tmp_path: Path) -> None:
    (losses,) = run_ranks(1, retried, tmp_path)
    records = read(tmp_path, "steps.jsonl")
    assert [record["loss"] for record in records] == losses
    assert [(record["samples"], record["tokens"]) for record in records] == [(2, 16)] * 3


class WithScale(TinyLM):
    """Returns a parameter, as CLIP does with the scale of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return super().forward(ids, labels) * self.scale, self.scale


def returns_a_parameter(folder: Path) -> int:
    engine = make_engine(folder, build(WithScale))
    for number in range(3):
        loss, scale = engine(*batch(number, 0))
        engine.backward(loss)
        engine.step()
    engine.close()
    return len(scale._backward_hooks or ())


def test_a_parameter_that_the_model_returns_gets_no_hooks(tmp_path: Path) -> None:
    assert run_ranks(1, returns_a_parameter, tmp_path) == [0]


EVALUATION_S = 0.2


def evaluate_and_log(folder: Path) -> None:
    engine = make_engine(folder)
    take_steps(engine, range(2))
    # The data of an evaluation is loaded, and its metrics are computed, between the forwards.
    engine.eval()
    with torch.no_grad():
        for number in range(2):
            time.sleep(EVALUATION_S / 2)
            (engine if number else engine.module)(*batch(number, 0))
    engine.train()
    engine.log(accuracy=np.float32(0.5), count=np.int64(3))
    take_steps(engine, range(2, 3))
    with pytest.raises(ZeroEngineError, match=r"log\(\): z is Tensor; write a number"):
        engine.log(z=torch.tensor(1j))
    engine.log(final=torch.tensor(2.5))
    engine.close()


def test_an_evaluation_lowers_no_rate_and_its_numbers_belong_to_the_step_before(tmp_path: Path) -> None:
    run_ranks(1, evaluate_and_log, tmp_path)
    _, before, record = (StepRecord(**line) for line in read(tmp_path, "steps.jsonl"))
    end = read(tmp_path, "events.jsonl")[-1]
    assert record.split["evaluation"] >= EVALUATION_S and before.split["evaluation"] == 0 and record.tokens == 16
    assert sum(record.split.values()) == pytest.approx(record.seconds)
    rates = [StepGroup.from_record(step.to_json()).rate("tokens") or 0.0 for step in (before, record)]
    assert 16 / record.training_seconds == pytest.approx(rates[1])
    assert record.seconds > EVALUATION_S > record.training_seconds and rates[1] > rates[0] / 5
    assert before.user == {"accuracy": 0.5, "count": 3.0} and record.user == {"final": 2.5}
    assert end["text"].endswith("after step 3")


def skip_and_go_back(folder: Path) -> list[float]:
    start()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.125))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    settings = config(1, optimizer=None, monitor={"folder": str(folder)})
    engine = zeroengine.initialize(model, optimizer, settings, lr_scheduler=schedule)
    rates = []
    for number in range(4):
        engine.backward(engine(*batch(number, 0)) * (float("inf") if number % 2 else 1.0))
        # On a GPU the schedule goes back after a skipped step when the next backward begins.
        rates.append(float(optimizer.param_groups[0]["lr"]))
        engine.step()
    engine.save_checkpoint(folder / "checkpoints")
    take_steps(engine, range(2))
    engine.load_checkpoint(folder / "checkpoints")
    engine.close()
    return rates


def test_events_have_the_numbers_of_records_and_rates_are_those_that_the_step_used(tmp_path: Path) -> None:
    (rates,) = run_ranks(1, skip_and_go_back, tmp_path)
    records = read(tmp_path, "steps.jsonl")
    skipped = [record["step"] for record in records if record["skipped"]]
    events = read(tmp_path, "events.jsonl")
    assert skipped == [event["step"] for event in events if event["kind"] == "skip"] == [2, 4]
    assert [event["step"] for event in events if event["kind"] == "resume"] == [4]
    assert [record["lr"] for record in records[:4]] == [[rate] for rate in rates]


def two_engines(folder: Path) -> None:
    keys = {"trace": {"steps": [1], "folder": str(folder)}}
    keys |= {"flops_profiler": {"enabled": True, "profile_step": 0, "output_file": str(folder / "flops.txt")}}
    first, second = (make_engine(folder, **keys) for _ in range(2))
    for engine in (first, second, first, second, second):
        take_steps(engine, range(2))
    second.close()
    first.close()


def test_two_engines_of_one_process_write_two_folders(tmp_path: Path) -> None:
    run_ranks(1, two_engines, tmp_path)
    assert [len(read(tmp_path / name, "steps.jsonl")) for name in ("", "engine-2")] == [4, 6]
    assert all(
        (tmp_path / name / file).is_file() for name in ("", "engine-2") for file in ("trace-1.json", "flops.txt")
    )


def compiled(folder: Path) -> tuple[int, int]:
    from torch._dynamo.utils import counters

    model = build()
    for block in model.blocks:
        block.compile(backend="eager")
    engine = make_engine(folder, model)
    take_steps(engine, range(1))
    after_first = counters["frames"]["total"]
    take_steps(engine, range(1, 3))
    engine.close()
    return after_first, counters["frames"]["total"]


def test_counting_operations_compiles_nothing_again(tmp_path: Path) -> None:
    ((after_first, after_last),) = run_ranks(1, compiled, tmp_path)
    assert after_last == after_first > 0
    matrices = sum(param.numel() for param in build().parameters() if param.dim() > 1)
    assert [record["flops"] for record in read(tmp_path, "steps.jsonl")] == [None, *[16 * 6.0 * matrices] * 2]


def folder_of_one_rank(folder: Path) -> None:
    if start() == 0:
        os.environ["ZEROENGINE_RUN_FOLDER"] = str(folder)
    with pytest.raises(DivergenceError, match="rank 1: the run folder in ZEROENGINE_RUN_FOLDER is absent"):
        zeroengine.initialize(build(), None, config(3))


def test_a_run_folder_in_the_environment_of_one_rank_is_refused(tmp_path: Path) -> None:
    run_ranks(2, folder_of_one_rank, tmp_path)
