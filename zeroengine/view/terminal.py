"""Show a run in the terminal, with rich. Without a terminal the same comes out as plain text."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from zeroengine.utils.formats import (
    MISSING,
    counted,
    format_count,
    format_duration,
    format_loss,
    format_memory,
    format_share,
)
from zeroengine.view.run_reader import RunReader
from zeroengine.view.step_group import merge_groups
from zeroengine.view.summary import summarize

# The colors of the parts of a step, the same as in the HTML page as far as a terminal has them.
COLORS = {
    "forward": "bright_cyan",
    "backward": "blue",
    "gather": "yellow",
    "reduce": "bright_red",
    "exchange": "bright_magenta",
    "update": "green",
    "offload": "magenta",
    "checkpoint": "white",
    "evaluation": "bright_yellow",
    "other": "bright_black",
}
SPARKS = "▁▂▃▄▅▆▇█"
# The blocks of a bar where there are no colors. A part that is not listed has its first letter.
LETTERS = {"other": ".", "exchange": "x"}
STATE_COLORS = {"running": "green", "ended": "green", "failed": "red", "silent": "yellow", "starting": "cyan"}
TOP_ROWS = 5
LAST_EVENTS = 8


def make_console(width: int | None = None) -> Console:
    """Return rich's console for stdout; where it is no terminal, text of 100 columns."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale without these characters, as in many batch jobs, would end the command with an error.
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False, width=width)
    return console if console.is_terminal or width else Console(highlight=False, width=100)


def render_run(reader: RunReader, width: int, colors: bool = True, now: float | None = None) -> RenderableType:
    """Return what the terminal shows of a run.

    Args:
        reader: The run.
        width: Columns of the terminal.
        colors: Whether the terminal has colors; without them a bar is drawn with letters.
        now: The time in Unix seconds (by default, that of this machine).
    """
    summary = summarize(reader, now)
    parts: list[RenderableType] = [render_head(summary), render_figures(reader, summary, width)]
    if summary["run"]["split"]:
        parts += [Text(), render_split(summary, width, colors)]
    memory, units, slowest = render_memory(summary), render_units(summary), render_slowest(summary)
    events = render_events(summary) if summary["events"] else None
    for table in (memory, units, slowest, events):
        if table is not None:
            parts += [Text(), table]
    parts += [Text(f"! {notice}", style="yellow") for notice in summary["notices"]]
    return Group(*parts)


def render_head(summary: dict[str, Any]) -> Text:
    """Return one line: the folder, the state, the model and the ranks."""
    model = summary["model"] or {}
    ranks = summary["world_size"]
    facts = [
        str(model.get("class", "")),
        f"{format_count(model['parameters'])} parameters" if "parameters" in model else "",
        counted(ranks, "rank") if ranks else "",
        str(summary["device"] or ""),
    ]
    head = Text.assemble((summary["folder"], "bold"), "  ", (summary["state"], STATE_COLORS[summary["state"]]))
    return head.append("  " + " · ".join(filter(None, facts)))


def render_figures(reader: RunReader, summary: dict[str, Any], width: int) -> Table:
    """Return progress, loss, rates and times, one in each row."""
    progress, recent, run, loss = (summary[key] for key in ("progress", "recent", "run", "loss"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    step, planned = progress["step"], progress["planned"]
    if step is not None:
        text = f"{step:,}"
        if planned:
            bar = progress_bar(step / planned, 24)
            text += f" of {planned:,}  {bar} {100 * min(1.0, step / planned):.0f} %"
        if progress["remaining_seconds"] and summary["state"] == "running":
            text += f"  {format_duration(progress['remaining_seconds'])} to go"
        add_cells(table, "step", text)
    notes = [f"{progress['skipped']} skipped (not in global_steps)"] if progress["skipped"] else []
    if progress["repeated"]:
        lost = format_duration(progress["repeated_seconds"])
        notes.append(f"{progress['repeated']} taken again after a restart ({lost})")
    if notes:
        add_cells(table, "", ", ".join(notes))
    add_cells(table, "time", f"{format_duration(progress['seconds'])} in {counted(progress['records'], 'step')}")
    if loss["last"] is not None:
        values = [group.mean("loss") for group in reader.groups]
        text = f"{format_loss(loss['last'])}  least {format_loss(loss['least'])}"
        add_cells(table, "loss", f"{text}  {sparkline(values, max(10, min(60, width - 45)))}")
    for name, value in summary["user"].items():
        add_cells(table, name, format_loss(value))
    if recent["steps"]:
        add_cells(table, "a step", both(recent["seconds_per_step"], run["seconds_per_step"], format_duration))
        for label, key in (("tokens/s", "tokens_per_second"), ("samples/s", "samples_per_second")):
            if run[key] is not None:
                add_cells(table, label, both(recent[key], run[key], format_count))
        if run["mfu"] is not None:
            add_cells(table, "MFU", both(recent["mfu"], run["mfu"], format_share))
    return table


def both(recent: float | None, run: float | None, form: Any) -> str:
    """Return a recent figure, with the one of the whole run in parentheses."""
    return f"{form(recent)}  ({form(run)} over the run)"


def render_split(summary: dict[str, Any], width: int, colors: bool) -> Group:
    """Return the parts of the recent steps as a bar, and a legend with seconds and shares."""
    split = summary["recent"]["split"]
    seconds = sum(split.values()) or 1.0
    bar, used, total = Text(), 0, 0.0
    bar_width = max(20, min(width - 2, 100))
    for name, value in split.items():
        total += value
        columns = round(bar_width * total / seconds) - used
        used += columns
        letter = "█" if colors else letter_of(name)
        bar.append(letter * columns, style=COLORS.get(name, "white"))
    legend = Table.grid(padding=(0, 3))
    cells = [
        Text.assemble(
            ("■" if colors else letter_of(name), COLORS.get(name, "white")),
            f" {name} {format_duration(value)} ",
            (format_share(value / seconds), "dim"),
        )
        for name, value in split.items()
        if value > 0
    ]
    per_row = max(1, width // 31)
    for start in range(0, len(cells), per_row):
        legend.add_row(*cells[start : start + per_row])
    newest = counted(summary["recent"]["steps"], "step")
    return Group(Text(f"Where a step's time goes (newest {newest})", "bold"), bar, legend)


def letter_of(name: str) -> str:
    """Return the letter of a part of a step; those of ``COLORS`` differ."""
    return LETTERS.get(name, name[:1].upper())


def render_memory(summary: dict[str, Any]) -> Table | None:
    """Return the bytes of each state by place, or None if none are known."""
    places = {place: states for place, states in summary["memory"].items() if states}
    if not places:
        return None
    table = make_table("Memory of a rank", [("place", "left"), ("total", "right"), ("by state", "left")])
    for place, states in places.items():
        ordered = sorted(states.items(), key=lambda item: -item[1])
        add_cells(
            table,
            place,
            format_memory(sum(states.values())),
            ", ".join(f"{name} {format_memory(nbytes)}" for name, nbytes in ordered),
        )
    if summary["peak_memory"]:
        add_cells(table, "peak", format_memory(summary["peak_memory"]), "the most so far")
    return table


def render_units(summary: dict[str, Any]) -> Table | None:
    """Return the units with the longest exposed waits, or None if nothing was waited for."""
    units = [unit for unit in summary["units"] if unit["gather"] + unit["reduce"] > 0]
    if not units:
        return None
    table = make_table(
        "Exposed wait by unit, seconds a step",
        [("unit", "left"), ("gather", "right"), ("reduce", "right"), ("", "left")],
    )
    longest = units[0]["gather"] + units[0]["reduce"]
    for unit in units[:TOP_ROWS]:
        share = (unit["gather"] + unit["reduce"]) / longest
        bar = "█" * max(1, round(20 * share))
        add_cells(table, unit["unit"], format_duration(unit["gather"]), format_duration(unit["reduce"]), bar)
    if len(units) > TOP_ROWS:
        add_cells(table, f"and {len(units) - TOP_ROWS} more", "", "", "")
    return table


def render_slowest(summary: dict[str, Any]) -> Table | None:
    """Return the ranks that the others waited for, or None if no rank stood out."""
    if not summary["slowest"]:
        return None
    columns = [("rank", "right"), ("host", "left"), ("cause", "left"), ("steps", "right"), ("time", "right")]
    table = make_table("Ranks that the others waited for", [*columns, ("worst", "left")])
    for row in summary["slowest"][:TOP_ROWS]:
        worst = f"{row['text']} (step {row['worst_step']})" if row["text"] else f"step {row['worst_step']}"
        cells = [row["rank"], row["host"] or "", row["cause"], f"{row['steps']:,}", format_duration(row["seconds"])]
        add_cells(table, *map(str, cells), worst)
    return table


def render_events(summary: dict[str, Any]) -> Table:
    """Return the newest events, with their times since the start of the run."""
    table = make_table("Events", [("", "right"), ("step", "right"), ("kind", "left"), ("", "left")])
    started = summary["started"]
    events = summary["events"][-LAST_EVENTS:]
    hidden = sum(summary["num_events"].values()) - len(events)
    if hidden > 0:
        add_cells(table, "", "", "", f"{hidden:,} earlier")
    for event in events:
        moment, since = event.get("time"), MISSING
        if moment is not None and started is not None:
            since = f"+{format_duration(max(0.0, moment - started))}"
        add_cells(table, since, str(event.get("step", "")), event["kind"], event["text"])
    return table


def make_table(title: str, columns: Sequence[tuple[str, Any]]) -> Table:
    """Return an empty table without lines, under its title."""
    table = Table(title=title, title_style="bold", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in columns:
        table.add_column(Text(name), justify=justify, header_style="dim", overflow="fold")
    return table


def add_cells(table: Table, *cells: str) -> None:
    """Add a row of plain text: names and messages of a run may hold markup of rich, or codes of a terminal."""
    table.add_row(*(Text("".join(c if c.isprintable() else " " for c in cell)) for cell in cells))


def render_comparison(readers: Sequence[RunReader], now: float | None = None) -> Table:
    """Return two runs side by side, with the ratio of the second to the first."""
    summaries = [summarize(reader, now) for reader in readers]
    table = make_table("", [("", "left"), *((s["folder"], "right") for s in summaries), ("ratio", "right")])
    rows: list[tuple[str, list[float | None], Any]] = [
        ("steps", [s["progress"]["records"] for s in summaries], lambda n: MISSING if n is None else f"{n:,}"),
        ("last loss", [s["loss"]["last"] for s in summaries], format_loss),
        (*loss_at_last_common_step(readers), format_loss),
        ("seconds a step", [s["run"]["seconds_per_step"] for s in summaries], format_duration),
        ("tokens/s", [s["run"].get("tokens_per_second") for s in summaries], format_count),
        ("MFU", [s["run"].get("mfu") for s in summaries], format_share),
    ]
    names = dict.fromkeys(name for s in summaries for name in s["user"])
    rows += [(name, [s["user"].get(name) for s in summaries], format_loss) for name in names]
    names = dict.fromkeys(name for s in summaries for name in s["run"]["split"])
    rows += [(f"  {name}", [s["run"]["split"].get(name) for s in summaries], format_duration) for name in names]
    rows.append(("peak memory", [s["peak_memory"] for s in summaries], format_memory))
    for label, values, form in rows:
        if any(value is not None for value in values):
            first, second = values
            ratio = f"{second / first:.3f}" if first and second is not None else ""
            add_cells(table, label, *map(form, values), ratio)
    return table


def loss_at_last_common_step(readers: Sequence[RunReader]) -> tuple[str, list[float | None]]:
    """Return a label, and each run's mean loss over the steps around the last one that both runs have."""
    if not all(reader.groups for reader in readers):
        return "loss at the same step", [None] * len(readers)
    step = min(reader.groups[-1].last_step for reader in readers)
    losses = []
    for reader in readers:
        before = [group for group in reader.groups if group.first_step <= step][-5:]
        losses.append(merge_groups(before).mean("loss") if before else None)
    return f"loss at step {step:,}", losses


def progress_bar(share: float, width: int) -> str:
    """Return a bar of characters that is filled to `share` of one."""
    filled = round(width * min(1.0, max(0.0, share)))
    return "█" * filled + "░" * (width - filled)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return numbers as a line of blocks, the mean of neighbors where there are more than `width`."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    columns = min(width, len(known))
    edges = [index * len(known) // columns for index in range(columns + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)
