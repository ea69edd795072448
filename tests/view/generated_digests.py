"""Run folders with digests as training would write them: each state is a number that depends on all before it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.view.generated_runs import STARTED, run_facts

KINDS = ("parameters", "gradients", "moments")
UNITS = ["embedding", *(f"layers.{i}" for i in range(8)), "head"]
# A change of one state: the step, the kind, and the units.
Change = tuple[int, str, Iterable[int]]


def mix(values: np.ndarray) -> np.ndarray:
    """Return the finalizer of splitmix64 of each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def history(steps: int, num_units: int, lr: Mapping[int, float], changes: Sequence[Change] = (), seed: int = 0) -> Any:
    """Yield the number of each step, its digests by kind, its learning rate and its loss.

    Args:
        steps: How many.
        num_units: The number of units.
        lr: The learning rate from a step on.
        changes: What is changed beside the rules.
        seed: Of the data, so that runs of two seeds differ from the first step on.
    """
    rate, ids = 0.0, np.arange(num_units, dtype=np.uint64)
    parameters, moments = mix(ids + np.uint64(77)), mix(ids + np.uint64(99))
    for step in range(1, steps + 1):
        rate = lr.get(step, rate)
        changed = {kind: np.zeros(num_units, np.uint64) for kind in KINDS}
        for at, kind, units in changes:
            changed[kind][list(units)] ^= np.uint64(at == step)
        loss = int(parameters.sum() % np.uint64(1000)) / 1000
        gradients = mix(ids + parameters.sum() + np.uint64(step * 1000 + seed)) ^ changed["gradients"]
        moments = mix(moments + gradients) ^ changed["moments"]
        parameters = mix(parameters + moments + np.float64(rate).view(np.uint64)) ^ changed["parameters"]
        yield step, {"parameters": parameters, "gradients": gradients, "moments": moments}, rate, loss


def digits(numbers: np.ndarray) -> str:
    """Return 16 hexadecimal digits for each number."""
    return numbers.astype(">u8").tobytes().hex()


def header(units: Sequence[str], ranks: int, **changes: Any) -> dict[str, Any]:
    return {"format": 1, "units": list(units), "world_size": ranks, "time": STARTED, **changes}


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]], mode: str = "w") -> None:
    with open(path, mode) as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def write_digests(
    folder: Path,
    steps: int = 100,
    units: Sequence[str] = UNITS,
    *,
    every: int = 1,
    lr: Mapping[int, float] | None = None,
    changes: Sequence[Change] = (),
    seed: int = 0,
    ranks: int = 2,
    config: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Path:
    """Write a run folder with digests of each step whose number `every` divides, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    full = run_facts(ranks, len(units) - 2, units=list(units), device="cpu", **facts)
    full["config"] |= {"bf16": {"enabled": False}, "monitor": {"folder": str(folder)}} | (config or {})
    (folder / "run.json").write_text(json.dumps(full))
    taken = list(history(steps, len(units), lr or {1: 0.001}, changes, seed))
    write_lines(
        folder / "steps.jsonl",
        ({"step": step, "time": STARTED + step, "lr": [rate], "loss": loss} for step, _, rate, loss in taken),
    )
    rows = ({"step": step, **{k: digits(v) for k, v in states.items()}} for step, states, _, _ in taken)
    write_lines(folder / "digests.jsonl", [header(units, ranks), *(row for row in rows if row["step"] % every == 0)])
    return folder
