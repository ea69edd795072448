"""Say in figures how a run goes: the object that `zero-view --json` prints, and that the terminal shows."""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Iterator
from typing import Any

from zeroengine.view.run_reader import RunReader
from zeroengine.view.step_group import StepGroup

# The parts of a step's time, in the order in which they are shown.
SPLIT = tuple("forward backward gather reduce exchange update offload checkpoint evaluation other".split())
PLACES = ("device", "cpu", "nvme")
SHOWN_EVENTS = 20


def summarize(reader: RunReader, now: float | None = None) -> dict[str, Any]:
    """Return the figures of a run as JSON types.

    Seconds, bytes and rates are plain numbers; None stands for what is not known. "recent" figures are means over the
    newest 20 steps, "run" figures over all steps.

    Args:
        reader: The run.
        now: The time in Unix seconds (by default, that of this machine).
    """
    now = time.time() if now is None else now
    facts, total, recent = reader.facts, reader.total, reader.recent
    state = reader.state(now)
    return {
        "folder": str(reader.folder),
        "state": state,
        "format": facts.get("format"),
        "model": facts.get("model"),
        "world_size": facts.get("world_size"),
        "device": facts.get("device"),
        "versions": facts.get("versions"),
        "started": reader.started,
        "progress": progress(reader, state),
        "loss": {
            "first": reader.groups[0].mean("loss") if reader.groups else None,
            "last": reader.last.mean("loss") if reader.last else None,
            "least": total.minima.get("loss") if total else None,
            "recent": recent.mean("loss") if recent else None,
        },
        "grad_norm": reader.last.mean("grad_norm") if reader.last else None,
        "lr": list(reader.last.section("lr").values()) if reader.last else [],
        "recent": speed(recent),
        "run": speed(total),
        "memory": {place: {name: int(nbytes) for name, nbytes in memory_of(recent, place).items()} for place in PLACES},
        "peak_memory": total.maxima.get("memory.peak") if total else None,
        "slowest": list(slowest_ranks(reader, total)),
        "units": list(waiting_units(reader, total)),
        # Only some steps have such numbers as a held-out loss, so the newest of each counts.
        "user": dict(ChainMap(*(group.section("user") for group in reversed(reader.groups)))),
        "num_events": reader.num_events,
        "events": list(reader.events)[-SHOWN_EVENTS:],
        "notices": reader.notices(),
    }


def progress(reader: RunReader, state: str) -> dict[str, Any]:
    """Return how far the run is.

    Returns:
        `step` (the newest), `planned`, `records` (steps written), `skipped`, `repeated` (taken again after a restart),
        `repeated_seconds`, `seconds` (of all steps), `remaining_seconds`.
    """
    total, repeated, recent = reader.total, reader.repeated, reader.recent
    step = reader.groups[-1].last_step if reader.groups else None
    planned = reader.facts.get("steps_planned")
    step_seconds = recent.mean("seconds") if recent else None
    remaining = None
    if planned is not None and step is not None and step_seconds is not None and state != "ended":
        remaining = max(0, planned - step) * step_seconds
    return {
        "step": step,
        "planned": planned,
        "records": total.num_steps if total else 0,
        "skipped": int(total.sums.get("skipped", 0)) if total else 0,
        "repeated": repeated.num_steps if repeated else 0,
        "repeated_seconds": repeated.sums.get("seconds", 0.0) if repeated else 0.0,
        "seconds": total.sums.get("seconds", 0.0) if total else 0.0,
        "remaining_seconds": remaining,
        "last_time": total.end if total else None,
    }


def speed(group: StepGroup | None) -> dict[str, Any]:
    """Return the rates of a group of steps, and the seconds of each part of a step; all None or empty without one."""
    if group is None:
        return {"steps": 0, "seconds_per_step": None, "split": {}}
    split = group.section("split")
    # A kind that this code does not know follows those that it knows.
    names = [*(name for name in SPLIT if name in split), *(name for name in split if name not in SPLIT)]
    return {
        "steps": group.num_steps,
        "seconds_per_step": group.mean("seconds"),
        "longest_step_seconds": group.maxima.get("seconds"),
        "tokens_per_second": group.rate("tokens"),
        "samples_per_second": group.rate("samples"),
        "flops_per_second": group.rate("flops"),
        "mfu": group.mean("mfu"),
        "split": {name: split[name] for name in names},
        "traffic": group.section("traffic"),
    }


def memory_of(group: StepGroup | None, place: str) -> dict[str, float]:
    """Return the most bytes of each state in one place: device, cpu or nvme. States without bytes are left out."""
    if group is None:
        return {}
    prefix = f"memory.{place}."
    maxima = {key.removeprefix(prefix): value for key, value in group.maxima.items() if key.startswith(prefix)}
    return {name: value for name, value in maxima.items() if value}


def slowest_ranks(reader: RunReader, group: StepGroup | None) -> Iterator[dict[str, Any]]:
    """Yield the ranks that the others waited for, with the cause, those that cost the most time first."""
    hosts = reader.facts.get("hosts", [])
    delays = group.delays if group else {}
    for (rank, cause), delay in sorted(delays.items(), key=lambda item: -item[1].seconds):
        yield {
            "rank": rank,
            "host": hosts[rank] if 0 <= rank < len(hosts) else None,
            "cause": cause,
            "steps": delay.steps,
            "seconds": delay.seconds,
            "worst_step": delay.worst_step,
            "worst_seconds": delay.worst_seconds,
            "text": delay.text,
        }


def waiting_units(reader: RunReader, group: StepGroup | None) -> Iterator[dict[str, Any]]:
    """Yield each unit's exposed wait in seconds a step, the longest first."""
    if group is None:
        return
    gather, reduce = group.mean_array("units.gather"), group.mean_array("units.reduce")
    names = unit_names(reader, max(len(gather), len(reduce)))
    rows = [
        (name, float(gather[i]) if i < len(gather) else 0.0, float(reduce[i]) if i < len(reduce) else 0.0)
        for i, name in enumerate(names)
    ]
    for name, gather_seconds, reduce_seconds in sorted(rows, key=lambda row: -row[1] - row[2]):
        yield {"unit": name, "gather": gather_seconds, "reduce": reduce_seconds}


def unit_names(reader: RunReader, count: int) -> list[str]:
    """Return the names of the units, or numbers for those that run.json does not name."""
    known: list[str] = reader.facts.get("units", [])[:count]
    return known + [f"unit {index}" for index in range(len(known), count)]
