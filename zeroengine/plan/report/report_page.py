"""A page with the memory and the time of each candidate, from the JSON form of a plan. It needs no network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any, NamedTuple

from zeroengine.plan.report.report import (
    LARGEST_HEADS,
    failures,
    largest_rows,
    machine_text,
    model_text,
    offload_text,
    rate_text,
    rate_unit,
    seconds_text,
    stage_text,
    written_degrees,
)
from zeroengine.utils.byte_size import format_byte_size

Json = Mapping[str, Any]
# The parts of a bar: key, name, and the color by its number in page.html.
MEMORY_PARTS = (
    ("parameters", "parameters", 1),
    ("gathered", "gathered units", 2),
    ("gradients", "gradients", 3),
    ("buckets", "gradient buckets", 4),
    ("master", "master weights", 5),
    ("optimizer", "optimizer state", 6),
    ("staging", "staging buffers", 7),
    ("checkpoint", "checkpoint copy", 7),
    ("activations", "activations", 8),
    ("temporaries", "temporaries of the update", 9),
    ("overhead", "context, allocator, buffers", 10),
)
# Bars end at this many times the memory that there is.
MOST_BEYOND = 1.5
TIME_PARTS = (
    ("compute", "compute", 1),
    ("gather", "exposed gather", 2),
    ("reduce", "exposed reduce", 4),
    ("update", "update", 6),
    ("offload", "exposed offload", 7),
)


class Part(NamedTuple):
    """One segment of a bar."""

    name: str
    color: int
    size: float
    text: str


def page(plan: Json) -> str:
    """Return the page.

    Args:
        plan: The plan as JSON types.
    """
    template = Template(files("zeroengine.plan.report").joinpath("assets/page.html").read_text())
    shown = plan["candidates"][: plan["shown"]]
    misfits = failures(plan)
    return template.substitute(
        title=html.escape(plan["model"]["name"]),
        model=html.escape(model_text(plan)),
        machine=html.escape(machine_text(plan)),
        verdict=html.escape(_verdict(plan)),
        charts="\n".join(_charts(plan, shown, misfits)),
        table=_candidate_table(plan, shown) + _degrees_table(shown),
        others=_others(plan),
        misfits=_misfit_table(misfits),
        largest=_largest_table(plan),
        notes="".join(f"<li>{html.escape(note)}</li>" for note in plan["notes"]),
        sources=_sources(plan["machine"]),
    )


def _verdict(plan: Json) -> str:
    best = plan["candidates"][0]
    if not best["fits"]:
        return "Nothing fits on this machine."
    rate = f", {rate_text(best)} {rate_unit(plan)}" if best["seconds"] else ""
    return (
        f"Best: {best['title']}, micro-batch {best['micro_batch']} with {best['accumulation']} "
        f"micro-step{'s' * (best['accumulation'] > 1)}: {format_byte_size(best['device_total'])} of "
        f"{format_byte_size(plan['machine']['device_bytes'])}{rate}."
    )


def _limit_text(nbytes: int) -> str:
    return f"The line marks {format_byte_size(nbytes)}."


def _charts(plan: Json, shown: Sequence[Json], misfits: Sequence[Json]) -> Iterable[str]:
    """Yield a chart of each memory that states lie in, and one of the step's time."""
    machine = plan["machine"]
    name = "Memory of one GPU" if machine["device"] == "cuda" else "Memory of one rank"
    ranks = machine["ranks_per_node"]
    rows = [
        (c, _memory_parts(c["device"], 1), _size_text(c["device_total"], machine["device_bytes"]))
        for c in (*shown, *misfits)
    ]
    yield _chart("memory", name, rows, machine["device_bytes"], _limit_text(machine["device_bytes"]))
    for key, total, limit, title in (
        ("cpu", "host_total", "host_bytes", "CPU memory of one node"),
        ("nvme", "disk_total", "disk_bytes", "Disk of one node"),
    ):
        using = [c for c in (*shown, *misfits) if sum(c[key].values())]
        rows = [(c, _memory_parts(c[key], ranks, c[total]), _size_text(c[total], machine[limit])) for c in using]
        if rows:
            yield _chart(key, title, rows, machine[limit], _limit_text(machine[limit]))
    timed = [c for c in shown if c["seconds"]]
    # Candidates of different batches are compared by the time of a sample.
    most = max((c["samples"] for c in timed), default=1)
    rows = [(c, _time_parts(c["seconds"], most / c["samples"]), _time_text(c, plan)) for c in timed]
    if rows:
        differ = len({c["samples"] for c in timed}) > 1
        note = "Bars are scaled to equal numbers of samples, because the batches differ." if differ else ""
        yield _chart("time", "Time of one step", rows, None, note)


def _memory_parts(sizes: Json, ranks: int, total: int = 0) -> list[Part]:
    parts = [
        Part(name, color, ranks * sizes[key], format_byte_size(ranks * sizes[key]))
        for key, name, color in MEMORY_PARTS
        if sizes.get(key)
    ]
    rest = total - sum(part.size for part in parts)
    if rest > 0:
        parts.append(Part("processes and temporaries", 10, rest, format_byte_size(rest)))
    return parts


def _time_text(candidate: Json, plan: Json) -> str:
    return f"{seconds_text(candidate['seconds']['total'])} s, {rate_text(candidate)} {rate_unit(plan)}"


def _time_parts(seconds: Json, scale: float) -> list[Part]:
    return [
        Part(name, color, scale * seconds[key], f"{seconds_text(seconds[key])} s")
        for key, name, color in TIME_PARTS
        if seconds[key] > 0
    ]


def _size_text(total: int, limit: int) -> str:
    left = limit - total
    return f"{format_byte_size(total)}, {format_byte_size(abs(left))} {'free' if left >= 0 else 'too much'}"


def _chart(name: str, title: str, rows: Sequence[tuple[Json, list[Part], str]], limit: float | None, note: str) -> str:
    """Return a chart: one stacked bar for each candidate, with a line where the memory ends."""
    scale = max([limit or 0.0, *(sum(part.size for part in parts) for _, parts, _ in rows)])
    # A candidate that lacks many times the memory would make the others too short to be seen.
    scale = min(scale, MOST_BEYOND * limit) if limit else scale
    used = {(part.color, part.name) for _, parts, _ in rows for part in parts}
    legend = "".join(f'<li><i class="c{color}"></i>{html.escape(part)}</li>' for color, part in sorted(used))
    bars = "\n".join(_bar(candidate, parts, text, scale, limit) for candidate, parts, text in rows)
    line = f'<p class="limit">{html.escape(note)}</p>' if note else ""
    return (
        f'<section id="{name}"><h2>{html.escape(title)}</h2><ul class="legend">{legend}</ul>{line}'
        f'<ol class="bars">{bars}</ol></section>'
    )


def _bar(candidate: Json, parts: Sequence[Part], text: str, scale: float, limit: float | None) -> str:
    label = f"#{candidate['number']} {candidate['title']}, {candidate['micro_batch']} x {candidate['accumulation']}"
    total = sum(part.size for part in parts)
    segments = "".join(
        f'<span class="segment c{part.color}" style="width:{100 * part.size / scale:.3f}%" '
        f'data-text="{html.escape(part.name)}: {html.escape(part.text)}, {part.size / total:.0%}"></span>'
        for part in parts
    )
    mark = f'<b class="mark" style="left:{100 * limit / scale:.3f}%"></b>' if limit else ""
    spoken = "; ".join(f"{part.name} {part.text}" for part in parts)
    kind = " misfit" if limit and total > limit else ""
    cut = " cut" if total > scale else ""
    return (
        f'<li class="row{kind}"><div class="label"><span>{html.escape(label)}</span>'
        f"<span>{html.escape(text)}</span></div>"
        f'<div class="bar{cut}" tabindex="0" role="img" aria-label="{html.escape(f"{label}: {text}. {spoken}")}">'
        f"{segments}{mark}</div></li>"
    )


def _rows(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    """Return an HTML table whose first `left` columns are text, and whose others are numbers."""
    head = "".join(f'<th scope="col"{_align(i, left)}>{html.escape(text)}</th>' for i, text in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{_align(i, left)}>{html.escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _align(column: int, left: int) -> str:
    return "" if column < left else ' class="number"'


def _candidate_table(plan: Json, candidates: Sequence[Json]) -> str:
    limit = plan["machine"]["device_bytes"]
    heads = ["#", "stage", "offload", "checkpointing", "micro-batch", "micro-steps", "memory", "free", "CPU of a node"]
    heads += ["disk of a node", "step", rate_unit(plan)]
    rows = [
        (
            str(c["number"]),
            stage_text(c),
            offload_text(c),
            "yes" if c["checkpointing"] else "no",
            str(c["micro_batch"]),
            str(c["accumulation"]),
            format_byte_size(c["device_total"]),
            format_byte_size(limit - c["device_total"]) if c["device_total"] <= limit else "-",
            format_byte_size(c["host_total"]) if c["host_total"] else "-",
            format_byte_size(c["disk_total"]) if c["disk_total"] else "-",
            f"{seconds_text(c['seconds']['total'])} s" if c["seconds"] else "-",
            rate_text(c),
        )
        for c in candidates
    ]
    return _rows(heads, rows, left=4)


def _degrees_table(candidates: Sequence[Json]) -> str:
    """Return what a configuration says for the degrees of candidates, where they are not those of the stage."""
    degrees = written_degrees(candidates)
    return _rows(("stage", "as a configuration says it"), degrees.items(), left=2) if degrees else ""


def _others(plan: Json) -> str:
    """Return the folded list of the candidates that charts leave out."""
    others = plan["candidates"][plan["shown"] :]
    if not others:
        return ""
    summary = f"{len(others)} more: slower ones that hold no larger micro-batch, and those that do not fit"
    return f"<details><summary>{summary}</summary>{_candidate_table(plan, others)}</details>"


def _misfit_table(misfits: Sequence[Json]) -> str:
    if not misfits:
        return ""
    rows = [(f"{c['title']}, micro-batch {c['micro_batch']}", "; ".join(c["reasons"])) for c in misfits]
    return f"<section><h2>What does not fit</h2>{_rows(('candidate', 'why'), rows, left=2)}</section>"


def _largest_table(plan: Json) -> str:
    rows = largest_rows(plan)
    return f"<section><h2>The largest that fits</h2>{_rows(LARGEST_HEADS, rows, left=2)}</section>" if rows else ""


def _sources(machine: Json) -> str:
    items = "".join(f"<li>{html.escape(name)}: {html.escape(text)}</li>" for name, text in machine["sources"].items())
    return (
        f"<details><summary>Where the machine's figures come from</summary><ul>{items}</ul></details>" if items else ""
    )
