"""Run folders as training would write them, made from random numbers: restarts, skips, slow ranks, many ranks."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

KINDS = ("forward", "backward", "gather", "reduce", "update", "offload", "checkpoint", "other")
STARTED = 1_790_000_000.0
MIB = 1 << 20


def run_facts(ranks: int, layers: int, steps_planned: int | None = None, **changes: Any) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "wandb": {"enabled": True, "api_key": "hidden-key"},
    }
    return {
        "format": 1,
        "zeroengine": "0.1.0",
        "started": STARTED,
        "world_size": ranks,
        "hosts": [f"node{rank // 8}" for rank in range(ranks)],
        "device": "NVIDIA H200",
        "units": ["embedding", *(f"layers.{i}" for i in range(layers)), "head"],
        "model": {"class": "GPT", "parameters": 1_234_567_890, "trainable": 1_234_567_890},
        "config": config,
        "versions": {"python": "3.11.4", "torch": "2.11.0", "zeroengine": "0.1.0"},
        "peak_flops": 989e12,
        "steps_planned": steps_planned,
        **changes,
    }


def step_record(step: int, time: float, ranks: int, units: int, draw: random.Random) -> dict[str, Any]:
    """Return the record of one step, whose parts add up as those of a real one do."""
    compute = [0.30 * draw.lognormvariate(0, 0.02) for _ in range(ranks)]
    slow = (ranks * 2) // 3
    if step % 40 >= 25:
        compute[slow] += 0.12
    longest = max(compute)
    wait = [0.05 + longest - seconds for seconds in compute]
    offload, other = [0.02 * draw.random() for _ in range(ranks)], [0.01] * ranks
    checkpoint = 0.4 if step % 50 == 0 else 0.0
    update, gather = 0.03, fmean(wait) * 0.6
    split = {
        "forward": fmean(compute) / 3 - update / 3,
        "backward": fmean(compute) * 2 / 3 - update * 2 / 3,
        "gather": gather,
        "reduce": fmean(wait) - gather,
        "update": update,
        "offload": fmean(offload),
        "checkpoint": checkpoint,
        "other": 0.01,
    }
    seconds = sum(split.values())
    weights = [draw.random() ** 3 for _ in range(units)]
    share = [weight / sum(weights) for weight in weights]
    excess = compute[slow] - median(compute)
    skipped = step % 97 == 13
    state = {"parameters": 300 * MIB, "gradients": 310 * MIB, "master": 0, "optimizer": 0, "buckets": 100 * MIB}
    return {
        "step": step,
        "time": time + seconds,
        "seconds": seconds,
        "loss": 2.0 + 6.0 * math.exp(-step / 80) + draw.gauss(0, 0.05),
        "lr": [3e-4 * min(1.0, step / 30), 3e-5 * min(1.0, step / 30)],
        "grad_norm": None if skipped else 1.0 + draw.random(),
        "loss_scale": 1.0,
        "skipped": skipped,
        "samples": 16 * ranks,
        "tokens": 16 * ranks * 2048,
        "flops": 1e14 * ranks,
        "mfu": 1e14 / seconds / 989e12,
        "split": split,
        "ranks": {"compute": compute, "wait": wait, "offload": offload, "other": other},
        "slowest": {
            "rank": slow,
            "seconds": excess,
            "cause": "compute",
            "text": f"rank {slow} computes {excess:.3f} s longer than the median",
        }
        if excess > 0.05
        else None,
        "units": {"gather": [s * gather for s in share], "reduce": [s * split["reduce"] for s in share]},
        "traffic": {"gather_bytes": 5e8, "reduce_bytes": 2e8, "disk_read_bytes": 0, "disk_write_bytes": 0},
        "memory": {
            "device": {**state, "gathered": (200 + step % 7) * MIB, "staging": 64 * MIB, "checkpoint": 0},
            "cpu": {"master": 600 * MIB, "optimizer": 1200 * MIB},
            "nvme": {},
            "peak": 1500 * MIB,
        },
        "user": {"accuracy": 1 - math.exp(-step / 100)},
    }


def run_lines(
    ranks: int, steps: int, layers: int = 6, restart: bool = False, seed: int = 0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines of a run in order of time, each with the name of its file."""
    draw, time, resumed = random.Random(seed), STARTED, False
    yield "events.jsonl", {"time": time, "step": 0, "kind": "start", "text": f"training starts on {ranks} ranks"}
    step = 1
    while step <= steps:
        record = step_record(step, time, ranks, layers + 2, draw)
        time = record["time"]
        yield "steps.jsonl", record
        if record["skipped"]:
            text = "step skipped: the gradient was not finite"
            yield "events.jsonl", {"time": time, "step": step, "kind": "skip", "text": text}
        if step % 50 == 0:
            text = f"checkpoint step-{step} is saved"
            yield "events.jsonl", {"time": time, "step": step, "kind": "checkpoint", "text": text, "seconds": 0.4}
        if restart and not resumed and step == steps * 3 // 5:
            newest = step // 50 * 50
            for kind, text in (
                ("eviction", "node1 was lost: no sign of life for 10 s"),
                ("restart", "restart 1 of 3"),
                ("resume", f"resumed from checkpoint step-{newest}"),
            ):
                time += 10.0
                yield "events.jsonl", {"time": time, "step": step, "kind": kind, "text": text}
            step, resumed = newest, True
        step += 1
    yield "events.jsonl", {"time": time, "step": steps, "kind": "end", "text": "training has ended"}


def write_run(
    folder: Path, ranks: int = 2, steps: int = 120, layers: int = 6, restart: bool = False, seed: int = 0, **facts: Any
) -> Path:
    """Write a whole run folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run_facts(ranks, layers, **{"steps_planned": steps} | facts)))
    with open(folder / "steps.jsonl", "w") as step_lines, open(folder / "events.jsonl", "w") as event_lines:
        for name, value in run_lines(ranks, steps, layers, restart, seed):
            (step_lines if name == "steps.jsonl" else event_lines).write(json.dumps(value) + "\n")
    return folder


def data_of(page: str) -> dict[str, Any]:
    """Return what the scripts of a page read."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])
