"""Draws one step of docs/design.md, in a light and a dark variant: events, actions, and what becomes of each unit.

    python -m tests.schedule.picture_of_a_step            # run two processes, and draw the quietest of their steps
    python -m tests.schedule.picture_of_a_step --redraw   # draw the step of tests/schedule/recorded_step.json again

The script stores what it measured beside itself, and the pictures in docs/assets.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from tests.conftest import ROOT
from tests.schedule.recorded_step import Record, record_step

RECORD = Path(__file__).with_name("recorded_step.json")
PICTURES = ROOT / "docs" / "assets"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
CODE = " font-family=\"ui-monospace, SFMono-Regular, Menlo, 'Liberation Mono', monospace\""
BOLD = ' font-weight="600"'

# Sizes in pixels.
WIDTH, LEFT, RIGHT = 840, 152, 14
CHIP, LINE, UNIT_LINE = 8, 22, 32
EVENTS = ("Entered", "Left", "Reached", "GradientsArrived")
ACTIONS = ("Gather", "Prefetch", "Release", "Reduce")
PHASES = (("forward", "ForwardBegan", "ForwardEnded"), ("backward", "BackwardBegan", "BackwardEnded"))


@dataclass(frozen=True)
class Colors:
    """The colors of one variant."""

    background: str
    panel: str
    text: str
    faint: str
    grid: str
    resident: str
    gather: str
    compute: str
    on_compute: str
    reduce: str
    update: str
    norm: str


VARIANTS = {
    "light": Colors(
        background="#ffffff",
        panel="#f6f8fa",
        text="#1f2328",
        faint="#59636e",
        grid="#d1d9e0",
        resident="#cfe3f7",
        gather="#0b7fc4",
        compute="#3949ab",
        on_compute="#ffffff",
        reduce="#d9730d",
        update="#2e8b57",
        norm="#cfe8d9",
    ),
    "dark": Colors(
        background="#0d1117",
        panel="#151b23",
        text="#f0f6fc",
        faint="#9198a1",
        grid="#3d444d",
        resident="#1d3b5e",
        gather="#4cc9f0",
        compute="#9fa8ff",
        on_compute="#0d1117",
        reduce="#f2994a",
        update="#56c288",
        norm="#1f4a35",
    ),
}


class Interval(NamedTuple):
    """A time in which something goes on for a unit, in microseconds."""

    unit: int
    begin: float
    end: float


@dataclass(frozen=True)
class Step:
    """What the picture shows of a recorded step.

    Attributes:
        units: The names of the units.
        events: The recorded events.
        arrivals: From the launch of each all-gather to its arrival.
        residences: From the launch of each all-gather to the release.
        forwards, backwards: What each unit computes.
        reduces: From the launch of each reduce-scatter to its arrival.
        updates: The update of each unit.
        norm: From the beginning of the step to the first update.
        end: The end of the step.
    """

    units: Sequence[str]
    events: Sequence[Record]
    arrivals: Sequence[Interval]
    residences: Sequence[Interval]
    forwards: Sequence[Interval]
    backwards: Sequence[Interval]
    reduces: Sequence[Interval]
    updates: Sequence[Interval]
    norm: tuple[float, float]
    end: float


def step_of(record: Record) -> Step:
    """Return what there is to draw of a record."""
    units, events = record["units"], record["events"]
    numbers = {name: number for number, name in enumerate(units)}
    in_flight: dict[str, list[Interval]] = {"gather": [], "reduce": []}
    for collective in record["collectives"]:
        if collective["label"] in numbers:
            interval = Interval(numbers[collective["label"]], collective["begin"], collective["arrived"])
            in_flight[collective["kind"]].append(interval)
    updates = [Interval(numbers[span["label"]], span["begin"], span["end"]) for span in record["spans"]]
    return Step(
        units,
        events,
        in_flight["gather"],
        list(residences(events)),
        list(computations(events, "Entered", ("Left",))),
        list(computations(events, "Reached", ("Reached", "BackwardEnded"))),
        in_flight["reduce"],
        updates,
        (moment(events, "StepBegan"), updates[0].begin),
        record["end"],
    )


def moment(events: Sequence[Record], name: str) -> float:
    """Return when the first event of a name came."""
    return float(next(event["begin"] for event in events if event["event"] == name))


def residences(events: Sequence[Record]) -> Iterator[Interval]:
    """Yield for how long each unit takes memory, by the actions."""
    since: dict[int, float] = {}
    for action in (action for event in events for action in event["actions"]):
        unit = action["unit"]
        if action["action"] in ("Gather", "Prefetch"):
            since.setdefault(unit, action["begin"])
        elif action["action"] == "Release":
            yield Interval(unit, since.pop(unit), action["end"])


def computations(events: Sequence[Record], begin: str, ends: Sequence[str]) -> Iterator[Interval]:
    """Yield what each unit computes, from when its event is handled to when one of ``ends`` comes."""
    running: Record | None = None
    for event in events:
        if running is not None and event["event"] in ends:
            yield Interval(running["unit"], running["end"], event["begin"])
            running = None
        if event["event"] == begin:
            running = event


def short_name(unit: str) -> str:
    """Return what stands for a unit in a chip: its number in a list, or the first letter."""
    return unit.rpartition(".")[2] if unit[-1].isdigit() else unit[0].upper()


class Drawing:
    """The parts of the picture, from the top to the bottom.

    Args:
        step: What to draw.
        colors: The colors.
    """

    def __init__(self, step: Step, colors: Colors) -> None:
        self._step, self._colors = step, colors
        self._names = [short_name(unit) for unit in step.units]
        self._scale = (WIDTH - LEFT - RIGHT) / step.end

    def x(self, microseconds: float) -> float:
        """Return where a moment lies."""
        return LEFT + microseconds * self._scale

    def text(
        self, x: float, y: float, value: str, color: str = "", size: int = 13, anchor: str = "start", style: str = ""
    ) -> str:
        """Return a line of text whose baseline is at y, with further attributes as ``style``."""
        return (
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{color or self._colors.text}" font-size="{size}" '
            f'text-anchor="{anchor}"{style}>{escape(value)}</text>'
        )

    def bar(self, begin: float, end: float, y: float, height: float, color: str, radius: float = 2) -> str:
        """Return a bar from one moment to another."""
        width = max((end - begin) * self._scale, 1.5)
        return (
            f'<rect x="{self.x(begin):.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" '
            f'fill="{color}"/>'
        )

    def line(self, x: float, top: float, bottom: float, color: str, dashes: str = "") -> str:
        """Return a vertical line."""
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        return f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}" stroke="{color}"{dashed}/>'

    def chip(self, x: float, y: float, unit: int, color: str, *, filled: bool) -> str:
        """Return the name of a unit in a circle."""
        fill, ink = (color, self._colors.background) if filled else (self._colors.background, color)
        return (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{CHIP}" fill="{fill}" stroke="{color}"/>'
            f'<text x="{x:.1f}" y="{y + 4:.1f}" fill="{ink}" font-size="11.5" font-weight="600" '
            f'text-anchor="middle">{escape(self._names[unit])}</text>'
        )

    def phases(self, y: float, bottom: float) -> Iterator[str]:
        """Yield the names of the phases, over the columns that they take."""
        events, colors = self._step.events, self._colors
        bounds = [(name, moment(events, first), moment(events, last)) for name, first, last in PHASES]
        for name, begin, end in [*bounds, ("step", moment(events, "StepBegan"), self._step.end)]:
            left, right = self.x(begin), self.x(end)
            yield (
                f'<rect x="{left:.1f}" y="{y:.1f}" width="{right - left:.1f}" height="{bottom - y:.1f}" rx="4" '
                f'fill="{colors.panel}"/>'
            )
            # A short phase has its name to the left of its end.
            x, anchor = ((left + right) / 2, "middle") if right - left > 40 else (right, "end")
            yield self.text(x, y + 17, name, size=14, anchor=anchor, style=BOLD)

    def rows(self, names: Sequence[str], key: str, y: float) -> Iterator[str]:
        """Yield the rows of events, or of actions."""
        colors = {"GradientsArrived": self._colors.reduce, "Reduce": self._colors.reduce, "Gather": self._colors.gather}
        colors |= {"Prefetch": self._colors.gather}
        items = self._step.events
        if key == "action":
            items = [{**action, "begin": event["begin"]} for event in items for action in event["actions"]]
        for row, name in enumerate(names):
            middle = y + LINE * (row + 0.5)
            color = colors.get(name, self._colors.faint)
            yield self.text(LEFT - 13, middle + 4, name, color, anchor="end", style=CODE)
            for item in items:
                if item[key] == name:
                    if name == "GradientsArrived" and not item["actions"]:
                        yield f'<circle cx="{self.x(item["begin"]):.1f}" cy="{middle:.1f}" r="1.8" fill="{color}"/>'
                    else:
                        yield self.chip(self.x(item["begin"]), middle, item["unit"], color, filled=key == "action")

    def connections(self, top: float, actions_top: float) -> Iterator[str]:
        """Yield a line from each event to the actions that it gives."""
        for event in self._step.events:
            rows = [ACTIONS.index(action["action"]) for action in event["actions"] if action["action"] in ACTIONS]
            if event["event"] in EVENTS and rows:
                begin = top + LINE * (EVENTS.index(event["event"]) + 0.5)
                end = actions_top + LINE * (max(rows) + 0.5)
                yield self.line(self.x(event["begin"]), begin, end, self._colors.grid)

    def units(self, y: float) -> Iterator[str]:
        """Yield the rows of the units."""
        step, colors = self._step, self._colors
        for unit, name in enumerate(step.units):
            top = y + UNIT_LINE * unit
            yield self.chip(LEFT - 20, top + 11, unit, colors.text, filled=False)
            yield self.text(LEFT - 34, top + 15, name, anchor="end", style=CODE)
            yield f'<path d="M{LEFT} {top + 11:.1f}H{WIDTH - RIGHT}" stroke="{colors.grid}" stroke-width="0.6"/>'
        for interval in step.residences:
            yield self.bar(interval.begin, interval.end, y + UNIT_LINE * interval.unit, 22, colors.resident, 3)
        for interval in step.arrivals:
            yield self.bar(interval.begin, interval.end, y + UNIT_LINE * interval.unit, 6, colors.gather)
        for letter, intervals in (("F", step.forwards), ("B", step.backwards)):
            for interval in intervals:
                top = y + UNIT_LINE * interval.unit
                yield self.bar(interval.begin, interval.end, top + 6, 16, colors.compute)
                middle, width = (interval.begin + interval.end) / 2, (interval.end - interval.begin) * self._scale
                if width > 9:
                    yield self.text(self.x(middle), top + 18, letter, colors.on_compute, 12, "middle", style=BOLD)
        for interval in step.reduces:
            yield self.bar(interval.begin, interval.end, y + UNIT_LINE * interval.unit + 23, 5, colors.reduce)
        for interval in step.updates:
            yield self.bar(interval.begin, interval.end, y + UNIT_LINE * interval.unit, 22, colors.update)

    def notes(self, y: float) -> Iterator[str]:
        """Yield what a reader should see, where the rows are empty."""
        step, last, faint = self._step, len(self._step.units) - 1, self._colors.faint
        # The lines of the rows end before the letters.
        halo = f' paint-order="stroke" stroke="{self._colors.panel}" stroke-width="6"'
        for unit, after, note in (
            (1, step.forwards, "\u2190 released after its use"),
            (last, step.reduces, "\u2190 stays from forward to backward"),
            (last - 1, step.reduces, "\u2190 reduced during the backward"),
        ):
            (interval,) = (interval for interval in after if interval.unit == unit)
            yield self.text(self.x(interval.end) + 10, y + UNIT_LINE * unit + 15, note, faint, style=halo)
        (arrival,) = (interval for interval in step.arrivals if interval.unit == last)
        x, note = self.x(arrival.begin) - 8, "gathered ahead \u2192"
        yield self.text(x, y + UNIT_LINE * last + 15, note, faint, anchor="end", style=halo)

    def norm(self, y: float) -> Iterator[str]:
        """Yield the time in which the rank waits for the reduces, adds up, and computes the norm."""
        begin, end = self._step.norm
        height = UNIT_LINE * len(self._step.units)
        yield self.bar(begin, end, y, height - 8, self._colors.norm)
        x, middle = self.x((begin + end) / 2) + 4, y + height / 2
        label = self.text(x, middle, "sums and norm", anchor="middle")
        yield f'<g transform="rotate(-90 {x:.1f} {middle:.1f})">{label}</g>'

    def axis(self, y: float) -> Iterator[str]:
        """Yield the axis of time."""
        colors = self._colors
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{colors.faint}"/>'
        total = self._step.end / 1000
        interval = next(ms for ms in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if total / ms <= 12)
        for number in range(int(total // interval) + 1):
            x = self.x(1000 * number * interval)
            yield self.line(x, y, y + 4, colors.faint)
            label = f"{number * interval} ms" if number == 0 else str(number * interval)
            anchor = "start" if number == 0 else "end" if x > WIDTH - RIGHT - 12 else "middle"
            yield self.text(x, y + 16, label, colors.faint, 12, anchor)

    def legend(self, y: float) -> Iterator[str]:
        """Yield what the colors of the units' rows mean."""
        colors = self._colors
        x = 16.0
        for color, height, label in (
            (colors.gather, 6, "all-gather"),
            (colors.resident, 14, "parameters in memory"),
            (colors.compute, 14, "forward, backward"),
            (colors.reduce, 6, "reduce-scatter"),
            (colors.update, 14, "update of the shard"),
        ):
            yield f'<rect x="{x:.1f}" y="{y - height / 2:.1f}" width="20" height="{height}" rx="2" fill="{color}"/>'
            yield self.text(x + 26, y + 4, label)
            x += 50 + 7.4 * len(label)

    def svg(self) -> str:
        """Return the picture."""
        colors = self._colors
        phases_top = 12.0
        events_top = phases_top + 44
        actions_top = events_top + LINE * len(EVENTS) + 26
        units_top = actions_top + LINE * len(ACTIONS) + 30
        units_bottom = units_top + UNIT_LINE * len(self._step.units)
        height = units_bottom + 74
        heads = ((events_top, "events"), (actions_top, "actions"), (units_top, "units"))
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
            f'height="{height:.0f}" font-family="{FONT}" role="img">',
            "<title>One step at stage 3: events, actions and units</title>",
            f'<rect width="{WIDTH}" height="{height:.0f}" rx="8" fill="{colors.background}"/>',
            *self.phases(phases_top, units_bottom),
        ]
        parts += [
            *(self.text(LEFT - 13, y - 6, name, anchor="end", style=BOLD) for y, name in heads),
            *self.connections(events_top, actions_top),
            *self.rows(EVENTS, "event", events_top),
            *self.rows(ACTIONS, "action", actions_top),
            *self.norm(units_top),
            *self.units(units_top),
            *self.notes(units_top),
            *self.axis(units_bottom + 6),
            *self.legend(units_bottom + 50),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"


def order_of(record: Record) -> list[Any]:
    """Return the events and their actions without the moments: what follows from the schedule."""
    return [
        [event["event"], event.get("unit"), [[action["action"], action["unit"]] for action in event["actions"]]]
        for event in record["events"]
    ]


def draw(record: Record, folder: Path) -> None:
    """Write the pictures of a record."""
    for name, colors in VARIANTS.items():
        (folder / f"step-{name}.svg").write_text(Drawing(step_of(record), colors).svg())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.schedule.picture_of_a_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--redraw", action="store_true", help="draw the stored step again")
    parser.add_argument("--output", type=Path, default=PICTURES, help="the folder of the pictures")
    args = parser.parse_args()
    if not args.redraw:
        RECORD.write_text(json.dumps(record_step()) + "\n")
    draw(json.loads(RECORD.read_text()), args.output)


if __name__ == "__main__":
    main()
