"""Records of steps as the monitor makes them, for tests of what takes them."""

from __future__ import annotations

from typing import Any

from zeroengine.monitor.record import SPLIT, RunEvent, SlowestRank, StepMemory, StepRecord

SAMPLES = 8


def record(step: int, **changes: Any) -> StepRecord:
    """The record of a step with a number of its own in every field."""
    values: dict[str, Any] = {
        "step": step,
        "time": 1.7e9 + step,
        "seconds": 0.5,
        "loss": 4.0 / step,
        "lr": (1e-3 * step, 1e-4),
        "grad_norm": 1.5,
        "loss_scale": 1024.0,
        "samples": SAMPLES,
        "tokens": SAMPLES * 16,
        "flops": 3e12,
        "mfu": 0.25,
        "split": {kind: (number + 1) / 100 for number, kind in enumerate(SPLIT)},
        "slowest": SlowestRank(1, 0.12, "compute", "rank 1 computes 0.120 s longer than the median"),
        "units": {"gather": (0.01, 0.02), "reduce": (0.0, 0.03)},
        "traffic": {"gather_bytes": 4096.0, "reduce_bytes": 2048.0},
        "memory": StepMemory({"parameters": 1 << 20}, {"master": 3 << 20}, {}, 5 << 20),
        "user": {"accuracy": 0.5 + step},
    }
    return StepRecord(**values | changes)


def checkpoint_event(step: int) -> RunEvent:
    return RunEvent(1.7e9 + step, step, "checkpoint", "saved runs/a in 2.0 s", {"seconds": 2.0})
