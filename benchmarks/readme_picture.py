"""Draws the bars of README.md, in a light and a dark variant, from the measured figures in benchmarks/peers.json.

    python benchmarks/readme_picture.py              # draw docs/assets/peers-light.svg and peers-dark.svg
    python benchmarks/readme_picture.py --measure    # run benchmarks/peers.py first, on a machine that is idle

--measure needs the extra bench (DeepSpeed). Further arguments go to peers.py, such as --rounds 5.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "benchmarks" / "peers.json"
PICTURES = ROOT / "docs" / "assets"
NAMES = {"ddp": "DDP", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed", "zeroengine": "zeroengine"}
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"

# Sizes in pixels.
WIDTH = 840
STAGE_X, NAME_X = 16, 82
SPEED_X, MEMORY_X, PANEL_WIDTH = 176, 516, 270
TOP, BAR_HEIGHT, ROW_HEIGHT, STAGE_GAP = 72, 14, 21, 13


@dataclass(frozen=True)
class Colors:
    """The colors of one variant."""

    background: str
    text: str
    faint: str
    grid: str
    own: str
    other: str


VARIANTS = {
    "light": Colors("#ffffff", "#1f2328", "#59636e", "#d8dee4", "#3949ab", "#a9b1bb"),
    "dark": Colors("#0d1117", "#f0f6fc", "#9198a1", "#30363d", "#8c9eff", "#57606a"),
}


def text(x: float, y: float, value: str, color: str, size: int = 13, anchor: str = "start", weight: int = 400) -> str:
    """Return a line of text whose baseline is at y."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(value)}</text>'
    )


def rectangle(x: float, y: float, width: float, height: float, color: str, radius: int = 2) -> str:
    """Return a filled rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" fill="{color}"/>'


def rows_by_stage(figures: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """Return the engines of each stage, zeroengine last."""
    stages: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(figures["engines"], key=lambda row: (row["stage"], row["engine"] == "zeroengine", row["engine"])):
        stages.setdefault(row["stage"], []).append(row)
    return stages


def bars(figures: dict[str, Any], colors: Colors) -> Iterator[str]:
    """Yield the names and bars of all rows, from top to bottom."""
    most_memory = max(row["peak_mib"] for row in figures["engines"])
    fastest = max(1.0, *(row["highest"] for row in figures["engines"]))
    y = float(TOP)
    for stage, rows in rows_by_stage(figures).items():
        yield text(STAGE_X, y + 11, f"stage {stage}", colors.faint)
        for row in rows:
            own = row["engine"] == "zeroengine"
            color, weight = (colors.own, 600) if own else (colors.other, 400)
            yield text(NAME_X, y + 11, NAMES[row["engine"]], colors.text, weight=weight)
            scale = (PANEL_WIDTH - 46) / fastest
            yield rectangle(SPEED_X, y, row["speed"] * scale, BAR_HEIGHT, color)
            low, high = SPEED_X + row["lowest"] * scale, SPEED_X + row["highest"] * scale
            middle = y + BAR_HEIGHT / 2
            yield f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}" stroke="{colors.text}" stroke-width="1.5"/>'
            yield text(max(high, SPEED_X + row["speed"] * scale) + 6, y + 11, f"{row['speed']:.2f}", colors.text)
            length = row["peak_mib"] / most_memory * (PANEL_WIDTH - 46)
            yield rectangle(MEMORY_X, y, length, BAR_HEIGHT, color)
            yield text(MEMORY_X + length + 6, y + 11, f"{row['peak_mib']:,}", colors.text)
            y += ROW_HEIGHT
        y += STAGE_GAP


def height_of(figures: dict[str, Any]) -> int:
    """Return the picture's height."""
    return TOP + len(figures["engines"]) * ROW_HEIGHT + len(rows_by_stage(figures)) * STAGE_GAP + 34


def picture(figures: dict[str, Any], colors: Colors) -> str:
    """Return the picture as SVG."""
    height = height_of(figures)
    setting = (
        f"{figures['ranks']} CPU processes, {figures['dtype']}, {figures['rounds']} rounds; "
        "line: lowest to highest. Not measured on a GPU."
    )
    fastest = max(1.0, *(row["highest"] for row in figures["engines"]))
    floor = SPEED_X + (PANEL_WIDTH - 46) / fastest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="{FONT}" role="img">',
        f"<title>Speed and memory of {', '.join(NAMES.values())}</title>",
        rectangle(0, 0, WIDTH, height, colors.background, radius=8),
        text(SPEED_X, 28, "Speed", colors.text, 15, weight=600),
        text(SPEED_X, 48, "1 = no communication; longer is better", colors.faint, 12),
        text(MEMORY_X, 28, "Peak memory of a process, MiB", colors.text, 15, weight=600),
        text(MEMORY_X, 48, "shorter is better", colors.faint, 12),
        f'<path d="M{floor:.1f} {TOP - 8}V{height - 40}" stroke="{colors.grid}" stroke-dasharray="3 3"/>',
        *bars(figures, colors),
        text(STAGE_X, height - 14, setting, colors.faint, 12),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="run benchmarks/peers.py first")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="the file of figures")
    parser.add_argument("--output", type=Path, default=PICTURES, help="the folder of the pictures")
    args, further = parser.parse_known_args()
    if args.measure:
        subprocess.run([sys.executable, ROOT / "benchmarks" / "peers.py", "--json", args.figures, *further], check=True)
    elif further:
        parser.error(f"{' '.join(further)}: further arguments need --measure")
    figures = json.loads(args.figures.read_text())
    for name, colors in VARIANTS.items():
        (args.output / f"peers-{name}.svg").write_text(picture(figures, colors))


if __name__ == "__main__":
    main()
