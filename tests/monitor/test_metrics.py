"""The names and positions of what loggers are given."""

from __future__ import annotations

import math

import pytest

from tests.monitor.records import SAMPLES, record
from zeroengine.config import load
from zeroengine.monitor.metrics import Metrics


def test_deepspeeds_names_stand_where_deepspeed_writes_them() -> None:
    plain = Metrics(load({})).values(record(2))
    assert plain["Train/Samples/train_loss"] == 2.0 and plain["Train/Samples/lr"] == 2e-3
    assert not any("loss_scale" in name or "elapsed" in name for name in plain)
    timed = load({"fp16": {"enabled": True}, "wall_clock_breakdown": True})
    values = Metrics(timed).values(record(2))
    assert values["Train/Samples/loss_scale"] == 1024.0
    prefix = "Train/Samples/elapsed_time_ms_"
    times = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    split = record(2).split
    assert times["forward"] == 1000 * split["forward"]
    assert math.isclose(times["backward"], times["backward_inner"] + times["backward_allreduce"])
    assert math.isclose(times["step"], 1000 * (split["update"] + split["offload"]))

    values, split = Metrics(load({})).values(record(2)), record(2).split
    assert values["zeroengine/split/gather"] == split["gather"]
    outside = split["checkpoint"] + split["evaluation"]
    assert values["zeroengine/tokens_per_second"] == pytest.approx(SAMPLES * 16 / (0.5 - outside))
    assert values["zeroengine/lr/group1"] == 1e-4
    assert values["zeroengine/memory/cpu/master"] == 3 << 20
    assert values["accuracy"] == 2.5


def test_what_is_not_known_is_left_out() -> None:
    values = Metrics(load({})).values(record(2, loss=None, mfu=None, tokens=None, slowest=None, seconds=0.0))
    assert not {name for name in values if name.split("/")[-1] in ("train_loss", "mfu", "tokens_per_second")}
    assert not any("slowest" in name or "per_second" in name for name in values)


def test_positions_count_samples_over_a_resume_and_a_return_to_a_checkpoint() -> None:
    metrics = Metrics(load({}))
    positions = [metrics.position(record(step)) for step in (101, 102, 103, 102, 104)]
    assert positions == [SAMPLES * step for step in (101, 102, 103, 102, 104)]
    counted = Metrics(load({}))
    assert [counted.position(record(step, samples=step)) for step in (1, 2, 3)] == [1, 3, 6]
    assert Metrics(load({})).position(record(7, samples=None)) == 7
