"""The table of candidates for people, from the JSON form of a plan."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from zeroengine.plan.search.degree_choices import DEFAULT
from zeroengine.utils.formats import counted, format_byte_size

# A terminal of at least this many columns gets the columns of states and of the step's parts as well.
WIDE = 135
ANY_WIDTH = 1000
GIB = 2**30
PLACE_NAMES = {"cpu": "CPU", "nvme": "NVMe"}
# Columns of the wide table: head, and the states that they sum up.
STATE_COLUMNS = {
    "params": ("parameters", "gathered"),
    "grads": ("gradients", "buckets"),
    "optim": ("master", "optimizer", "staging"),
    "activ": ("activations",),
    "other": ("temporaries", "overhead"),
}
# By the key of a candidate that counts ranks which share something, its name in the table.
SHARING = {"sequence_parallel": "SP", "tensor_parallel": "TP", "expert_parallel": "EP"}
EXPOSED = ("gather", "reduce", "update", "offload")
Json = Mapping[str, Any]


def table(plan: Json, width: int | None = None, *, everything: bool = False, color: bool = False) -> str:
    """Return the report for a terminal.

    Args:
        plan: The plan as JSON types.
        width: Columns of the terminal. None: those of the terminal, or 80.
        everything: Show every candidate.
        color: Include escape sequences for colors.
    """
    width = width or shutil.get_terminal_size((80, 24)).columns
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=color, no_color=not color, highlight=False)
    report, unlimited = _report(plan, width, everything), console.options.update_width(ANY_WIDTH)
    if console.measure(report, options=unlimited).minimum > width:
        # A table of fewer columns, or else longer lines: figures that are cut would be read as others.
        report = _report(plan, min(width, WIDE - 1), everything)
        console.width = max(width, console.measure(report, options=unlimited).minimum)
    console.print(report)
    # rich fills lines with spaces up to the width of a column.
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _offload_text(candidate: Json) -> str:
    """Return where a candidate's states go: `-` for none, `optimizer CPU`, or `all CPU` with the parameters."""
    optimizer, param = candidate["offload_optimizer"], candidate["offload_param"]
    if optimizer == param != "none":
        return f"all {PLACE_NAMES[optimizer]}"
    moved = {"optimizer": optimizer, "params": param}
    return ", ".join(f"{state} {PLACE_NAMES[place]}" for state, place in moved.items() if place != "none") or "-"


def _stage_text(candidate: Json) -> str:
    """Return a candidate's stage, with other degrees than those of the stage and ranks that share: `3 hpZ TP 2`."""
    degrees = "" if candidate["degrees"] == DEFAULT else f" {candidate['degrees']}"
    sharing = "".join(f" {name} {candidate[key]}" for key, name in SHARING.items() if candidate[key] > 1)
    return f"{candidate['stage']}{degrees}{sharing}"


def _batch_text(candidate: Json) -> str:
    return f"{candidate['micro_batch']} x {candidate['accumulation']}"


def _machine_text(plan: Json) -> str:
    """Return the machine in one line."""
    machine = plan["machine"]
    ranks, nodes = machine["ranks_per_node"], machine["nodes"]
    kind = "GPU" if machine["device"] == "cuda" else "CPU rank"
    where = f" on each of {nodes} nodes" if nodes > 1 else ""
    disk = f", {format_byte_size(machine['disk_bytes'])} disk" if machine["disk_bytes"] else ""
    memory = format_byte_size(machine["device_bytes"])
    host = format_byte_size(machine["host_bytes"])
    devices = f"{counted(ranks, kind)}{where}, {memory} each"
    return f"{machine['name']}: {devices}; a node has {host} CPU memory{disk}"


def _model_text(plan: Json) -> str:
    """Return the model in one line."""
    model = plan["model"]
    trainable = f" ({_count_text(model['trainable'])} trainable)" if model["trainable"] != model["parameters"] else ""
    tokens = f", {model['tokens_per_sample']:,} tokens a sample" if model["tokens_per_sample"] else ""
    return (
        f"{model['name']}: {_count_text(model['parameters'])} parameters{trainable}{tokens}; {plan['precision']}, "
        f"{plan['optimizer']}"
    )


def _count_text(count: float) -> str:
    """Return a large count in words: `6.74 B`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:,.0f}"


def _rate_text(candidate: Json) -> str:
    """Return tokens per second, or samples per second where samples have no tokens."""
    rate = candidate["tokens_per_second"] or candidate["samples_per_second"]
    return "-" if not rate else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _report(plan: Json, width: int, everything: bool) -> RenderableType:
    candidates = plan["candidates"] if everything else plan["candidates"][: plan["shown"]]
    parts: list[RenderableType] = [Text(_model_text(plan), style="bold"), Text(_machine_text(plan)), Text("")]
    if any(candidate["fits"] for candidate in candidates):
        parts += [_candidates(plan, candidates, width), Text("")]
        if width < WIDE:
            parts += [_states_of_best(plan["candidates"][0]), Text("")]
        if any(candidate["degrees"] != DEFAULT for candidate in candidates):
            parts += [
                Text("Degrees, as a configuration says them", style="bold"),
                _written_degrees(candidates),
                Text(""),
            ]
    else:
        parts += [Text("Nothing fits.", style="bold red"), Text("")]
    for title, rows in (("Does not fit", _failures(plan)), ("Largest micro-batch that fits", _largest(plan))):
        if rows is not None:
            parts += [Text(title, style="bold"), rows, Text("")]
    folded = len(plan["candidates"]) - plan["shown"]
    notes = list(plan["notes"])
    if folded and not everything:
        notes.append(
            f"{counted(folded, 'more candidate')}: slower ones that hold no larger micro-batch, other "
            "micro-batches, and those that do not fit. --all lists all."
        )
    parts += [Text(f"- {note}") for note in notes]
    return Group(*parts)


def _candidates(plan: Json, candidates: list[Json], width: int) -> Table:
    """Return the table of candidates, with more columns on a wide terminal."""
    wide = width >= WIDE
    memory = "GPU GiB" if plan["machine"]["device"] == "cuda" else "GiB"
    on_host = any(candidate["host_total"] and sum(candidate["cpu"].values()) for candidate in candidates)
    on_disk = any(candidate["disk_total"] for candidate in candidates)
    candidates_offload = any(_offload_text(candidate) != "-" for candidate in candidates)
    exposed = (*EXPOSED, *["exchange"] * any(candidate[key] > 1 for candidate in candidates for key in SHARING))
    numbers = [memory, *(STATE_COLUMNS if wide else ()), "free"]
    numbers += ["node CPU"] * (wide and on_host) + ["disk"] * (wide and on_disk)
    numbers += [
        "s/step",
        *(exposed if wide else ()),
        "tokens/s" if plan["model"]["tokens_per_sample"] else "per second",
    ]
    columns: list[Column | str] = [
        Column("#", justify="right"),
        # The least width of a column is otherwise that of its longest word.
        Column("stage", no_wrap=True, min_width=max(len(_stage_text(candidate)) for candidate in candidates)),
        Column("offload", min_width=13 if candidates_offload else 7),
        Column("batch", justify="right", min_width=max(len(_batch_text(candidate)) for candidate in candidates)),
        Column("ckpt"),
        *(Column(head, justify="right", no_wrap=True, min_width=len(head)) for head in numbers),
    ]
    rows = Table(*columns, box=None, pad_edge=False, padding=(0, 1 if wide else 2, 0, 0), header_style="bold")
    for candidate in candidates:
        device, seconds = candidate["device"], candidate["seconds"]
        cells = [_gib(candidate["device_total"])]
        if wide:
            cells += [_gib(sum(device.get(name, 0) for name in names)) for names in STATE_COLUMNS.values()]
        cells += [_gib(plan["machine"]["device_bytes"] - candidate["device_total"])]
        cells += [_gib(candidate["host_total"])] * (wide and on_host)
        cells += [_gib(candidate["disk_total"])] * (wide and on_disk)
        cells += [_seconds_text(seconds["total"]) if seconds else "-"]
        if wide:
            cells += [_seconds_text(seconds[kind]) if seconds else "-" for kind in exposed]
        style = "bold green" if candidate["number"] == 1 else None if candidate["has_headroom"] else "yellow"
        rows.add_row(
            str(candidate["number"]),
            _stage_text(candidate),
            _offload_text(candidate),
            _batch_text(candidate),
            "yes" if candidate["checkpointing"] else "no",
            *cells,
            _rate_text(candidate),
            style=style if candidate["fits"] else "dim",
        )
    return rows


def _written_degrees(candidates: Sequence[Json]) -> Table:
    """Return what a configuration says for the degrees of candidates that differ from those of the stage, by name."""
    rows = Table(box=None, pad_edge=False, show_header=False)
    for name, candidate in {_stage_text(c): c for c in candidates if c["degrees"] != DEFAULT}.items():
        degrees = candidate["configuration"]["zero_optimization"]["degrees"]
        rows.add_row(name, json.dumps({"degrees": degrees})[1:-1])
    return rows


def _states_of_best(candidate: Json) -> Text:
    """Return the memory of a candidate by state, in one sentence, for terminals without room for columns."""
    sizes = [f"{name} {_gib(nbytes)}" for name, nbytes in candidate["device"].items() if nbytes >= GIB / 100]
    return Text(f"Memory of candidate {candidate['number']} in GiB: {', '.join(sizes)}.")


def _failures(plan: Json) -> Table | None:
    """Return why the candidates that lack least do not fit, one of each stage, degrees and offload that never fit.

    One that lacks no less than one before it at the same stage is left out.
    """
    least: dict[tuple[str, str], Json] = {}
    fitting = set()
    for candidate in plan["candidates"]:
        key = (_stage_text(candidate), _offload_text(candidate))
        if candidate["fits"]:
            fitting.add(key)
        elif key not in least or candidate["headroom"] > least[key]["headroom"]:
            least[key] = candidate
    least_by_stage: dict[int, float] = {}
    rows = Table(box=None, pad_edge=False, show_header=False)
    order = dict.fromkeys((_stage_text(setting), _offload_text(setting)) for setting in plan["settings"])
    for key in [k for k in order if k in least and k not in fitting]:
        candidate = least[key]
        if candidate["headroom"] > least_by_stage.get(candidate["stage"], -math.inf):
            least_by_stage[candidate["stage"]] = candidate["headroom"]
            title = f"{candidate['title']}, micro-batch {candidate['micro_batch']}"
            rows.add_row(title, "; ".join(candidate["reasons"]))
    return rows if rows.row_count else None


def _largest(plan: Json) -> Table | None:
    """Return the largest micro-batch of each kind of settings, without and with checkpointing.

    Settings are of a kind if their stage, degrees and offload are equal. A row is left out if one before it at the same
    stage holds as large ones.
    """
    sizes: dict[tuple[str, str], dict[bool, int]] = {}
    for setting in plan["settings"]:
        by_checkpointing = sizes.setdefault((_stage_text(setting), _offload_text(setting)), {})
        by_checkpointing[setting["checkpointing"]] = setting["largest_micro_batch"]
    shown: list[tuple[str, int, int]] = []
    columns = [Column(head, justify="right", no_wrap=True) for head in ("micro-batch", "checkpointed")]
    rows = Table("stage", "offload", *columns, box=None, pad_edge=False, header_style="bold")
    for (stage_and_degrees, offload), by_checkpointing in sizes.items():
        stage = stage_and_degrees.partition(" ")[0]
        plain, checkpointed = by_checkpointing.get(False, 0), by_checkpointing.get(True, 0)
        is_no_larger = any(s == stage and plain <= p and checkpointed <= c for s, p, c in shown)
        if is_no_larger or not (plain or checkpointed):
            continue
        shown.append((stage, plain, checkpointed))
        rows.add_row(stage_and_degrees, offload, *(f"{size:,}" if size else "-" for size in (plain, checkpointed)))
    return rows if rows.row_count else None


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.1f}" if abs(nbytes) >= 10 * GIB else f"{nbytes / GIB:.2f}"


def _seconds_text(seconds: float) -> str:
    """Return seconds with three digits."""
    return f"{seconds:,.1f}" if seconds >= 10 else f"{seconds:.3g}" if seconds >= 0.001 else f"{seconds:.1g}"
