"""Choose what the HTML page needs of a run: few enough numbers for a browser, whatever the run's length and ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from zeroengine.utils.masking import masked_tree
from zeroengine.view.run_reader import FREQUENT_EVENTS, RunReader
from zeroengine.view.step_group import Numbers, StepGroup, merge_groups
from zeroengine.view.summary import slowest_ranks, summarize, unit_names

# The most points of a line, columns and rows of the heat map, units and events of a page.
MAX_POINTS, MAX_COLUMNS, MAX_ROWS, MAX_UNITS, MAX_EVENTS = 600, 160, 128, 100, 600
# The most ranks of a column of the heat map for which the page has the delays.
MAX_DELAYS = 5
# What a rank does by itself. Time in `wait` is caused by others.
OWN_TIME = ("compute", "offload", "other")
RATES = ("tokens", "samples", "flops")


def run_data(reader: RunReader, name: str) -> dict[str, Any]:
    """Return what the page shows of one run, as JSON types.

    Args:
        reader: The run.
        name: What the page calls it.
    """
    points, columns = thin(reader.groups, MAX_POINTS), thin(reader.groups, MAX_COLUMNS)
    summary = summarize(reader)
    del summary["events"], summary["units"]
    facts = {key: value for key, value in reader.facts.items() if key not in ("hosts", "units", "format")}
    facts |= {"started": reader.started}
    started = reader.started or 0.0
    return {
        "name": name,
        "origin": started,
        "facts": masked_tree(facts),
        "summary": summary,
        "points": spans(points, started) | {"series": point_series(points)},
        "columns": spans(columns, started)
        | {"units": unit_waits(reader, columns), "ranks": rank_delays(columns, reader.facts.get("hosts", []))}
        | {"delays": [list(slowest_ranks(reader, group))[:MAX_DELAYS] for group in columns]},
        "events": shown_events(reader, started),
    }


def thin(groups: Sequence[StepGroup], count: int) -> list[StepGroup]:
    """Return at most `count` groups: neighbors are merged where there are more."""
    size = max(1, -(-len(groups) // count))
    return [merge_groups(groups[start : start + size]) for start in range(0, len(groups), size)]


def spans(groups: Sequence[StepGroup], origin: float) -> dict[str, list[Any]]:
    """Return the first and the last step of each group, its number of steps, and its times since `origin`."""
    return {
        "first": [group.first_step for group in groups],
        "last": [group.last_step for group in groups],
        "steps": [group.num_steps for group in groups],
        "start": [rounded(group.start - origin, 7) for group in groups],
        "end": [rounded(group.end - origin, 7) for group in groups],
    }


def point_series(groups: Sequence[StepGroup]) -> dict[str, list[float | None]]:
    """Return the mean of each number of the record by group; of memory the most, and of counts the rate a second."""
    names = dict.fromkeys(key for group in groups for key in group.counts)
    series = {}
    for name in names:
        if name in RATES:
            series[f"{name}_per_second"] = [rounded(group.rate(name)) for group in groups]
        elif name.startswith("memory."):
            series[name] = [rounded(group.maxima.get(name), 6) for group in groups]
        else:
            series[name] = [rounded(group.mean(name)) for group in groups]
    if "loss" in series and any(group.num_steps > 1 for group in groups):
        series["loss.least"] = [rounded(group.minima.get("loss")) for group in groups]
        series["loss.most"] = [rounded(group.maxima.get("loss")) for group in groups]
    return series


def unit_waits(reader: RunReader, groups: Sequence[StepGroup]) -> dict[str, Any]:
    """Return the exposed wait of each unit by group, in seconds a step; units that waited least are added up."""
    kinds = ("gather", "reduce")
    count = max((len(group.arrays.get(f"units.{kind}", ())) for group in groups for kind in kinds), default=0)
    names = unit_names(reader, count)
    waits = (
        {kind: np.stack([padded(group.mean_array(f"units.{kind}"), count) for group in groups]) for kind in kinds}
        if groups
        else {}
    )
    if count > MAX_UNITS:
        steps = np.array([group.num_steps for group in groups], dtype=np.float64)
        order = np.argsort(-(steps @ sum(waits.values())), kind="stable")
        kept, rest = np.sort(order[: MAX_UNITS - 1]), order[MAX_UNITS - 1 :]
        names = [names[index] for index in kept] + [f"{len(rest)} other units"]
        waits = {
            kind: np.column_stack([values[:, kept], values[:, rest].sum(axis=1)]) for kind, values in waits.items()
        }
    return {"names": names, **{kind: rounded_rows(values) for kind, values in waits.items()}}


def rank_delays(groups: Sequence[StepGroup], hosts: Sequence[str]) -> dict[str, Any]:
    """Return by how much each rank is above the median rank, in seconds a step, by group.

    With many ranks, a row of the heat map stands for several; it has the most of them.

    Returns:
        `rows` (the first and the last rank of each row), `labels`, and for `own`, `compute`, `offload`, `other` and
        `wait` the rows of each group.
    """
    kinds = (*OWN_TIME, "wait")
    count = max((len(group.arrays.get(f"ranks.{kind}", ())) for group in groups for kind in kinds), default=0)
    # A single rank waits for nobody.
    if count < 2:
        return {"rows": [], "labels": []}
    size = -(-count // MAX_ROWS)
    starts = range(0, count, size)
    rows = [(start, min(start + size, count) - 1) for start in starts]
    delays: dict[str, list[list[float | None]]] = {}
    for kind in ("own", *kinds):
        delays[kind] = []
        for group in groups:
            parts = OWN_TIME if kind == "own" else (kind,)
            seconds = sum((padded(group.mean_array(f"ranks.{part}"), count) for part in parts), np.zeros(count))
            above = seconds - np.median(seconds)
            delays[kind].append([rounded(float(above[first : last + 1].max()), 3) for first, last in rows])
    labels = [row_label(first, last, hosts) for first, last in rows]
    # Kinds in which no rank ever spends time have no picture.
    return {"rows": rows, "labels": labels} | {
        kind: values for kind, values in delays.items() if any(any(column) for column in values)
    }


def row_label(first: int, last: int, hosts: Sequence[str]) -> str:
    """Return the name of a row of the heat map."""
    text = f"rank {first}" if first == last else f"ranks {first} to {last}"
    on = list(dict.fromkeys(hosts[first : last + 1]))
    return f"{text} ({on[0]}{' ...' if len(on) > 1 else ''})" if on else text


def shown_events(reader: RunReader, origin: float) -> dict[str, Any]:
    """Return the events of the page: all where they are few; else the rare kinds, and some of the others.

    Returns:
        `rows` of `{time, step, kind, text}` in order, and `hidden`, the number of events without a row.
    """
    events = reader.events
    rare = [index for index, event in enumerate(events) if event["kind"] not in FREQUENT_EVENTS]
    frequent = [index for index, event in enumerate(events) if event["kind"] in FREQUENT_EVENTS]
    room = max(0, MAX_EVENTS - len(rare))
    every = max(1, -(-len(frequent) // max(1, room)))
    chosen = sorted(rare[-MAX_EVENTS:] + (frequent[::every] if room else []))
    rows = []
    for event in (events[index] for index in chosen):
        time = rounded(event["time"] - origin, 7) if "time" in event else None
        rows.append(
            {"time": time, "step": event.get("step"), "kind": event["kind"], "text": str(masked_tree(event["text"]))}
        )
    return {"rows": rows, "hidden": Counter(reader.num_events).total() - len(rows)}


def padded(values: Numbers, count: int) -> Numbers:
    """Return the values with zeros up to `count` of them."""
    return values if len(values) == count else np.pad(values, (0, count - len(values)))


def rounded_rows(values: Numbers) -> list[list[float | None]]:
    """Return a matrix as lists of short numbers."""
    return [[rounded(float(value), 3) for value in row] for row in values]


def rounded(value: float | None, digits: int = 5) -> float | None:
    """Return the number with few digits, which keeps the page small; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short
