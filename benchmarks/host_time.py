"""Shows where the host's time of a transformer block and step goes at stage 3, beside FSDP2 and the model alone.

    python benchmarks/host_time.py              # measure, print the table, and draw docs/assets/host-time-*.svg

It needs py-spy (`pip install py-spy`), which samples a process from outside, and so also sees the time inside of torch.
The setting is that of reads.py: one process is rank 0 of 64 (torch's `fake` process group), and the model so narrow
that nearly all of its time is the host's. Each case runs in a process of its own: the median step of the case is timed
first, and then sampled. A sample belongs to the part of the innermost function of the engine, of FSDP2 or of the
optimizer that is running.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from readme_picture import FONT, PICTURES, VARIANTS, Colors, rectangle, text
from reads import build, initialize, shard
from torch.testing._internal.distributed.fake_pg import FakeStore

CASES = {"plain": "the model alone", "engine": "zeroengine", "fsdp2": "FSDP2"}
LAYERS = 24
# Parts of a step in the order of the bars, with their colors in the light and the dark variant.
PARTS = {
    "torch, forward": ("#a9b1bb", "#57606a"),
    "torch, backward": ("#8b949e", "#6e7681"),
    "collectives": ("#b58900", "#c69026"),
    "order of collectives": ("#3949ab", "#8c9eff"),
    "gathers and releases": ("#5c6bc0", "#7986cb"),
    "reads of released parameters": ("#00897b", "#4db6ac"),
    "gradients": ("#7e57c2", "#b39ddb"),
    "hooks": ("#26a69a", "#80cbc4"),
    "FSDP2": ("#ad1457", "#f06292"),
    "step": ("#e07a5f", "#ffab91"),
}
# Where the innermost function of ours is, by the beginning of its file.
FILES = {
    "zeroengine/schedule/": "order of collectives",
    "zeroengine/runtime/executor": "order of collectives",
    "zeroengine/runtime/saved_views": "reads of released parameters",
    "zeroengine/runtime/graph_route": "reads of released parameters",
    **dict.fromkeys(
        (
            f"zeroengine/runtime/{name}"
            for name in ("reduce", "gradient", "unit_gradients", "user_gradients", "backward")
        ),
        "gradients",
    ),
    "zeroengine/comm/buffer_pool": "gradients",
    **dict.fromkeys(
        (f"zeroengine/runtime/{name}" for name in ("gather", "unit.", "full_buffer", "released", "deferred")),
        "gathers and releases",
    ),
    "zeroengine/comm/interfaces": "gathers and releases",
}


def run(case: str, seconds: float) -> None:
    """Run steps of a case in this process. Print the median microseconds per block, and go on for some seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    ids, model = torch.randint(0, 64, (1, 4)), build(LAYERS)
    step: Callable[[], Any]
    if case == "engine":
        engine = initialize(model)

        def step() -> None:
            engine.backward(engine(ids, ids))
            engine.step()
    elif case == "fsdp2":
        sharded, optimizer = shard(model)

        def step() -> None:
            sharded(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    else:

        def step() -> None:
            model(ids, ids).backward()
            model.zero_grad()

    times = []
    for _ in range(60):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    print(statistics.median(times[10:]) / LAYERS * 1e6, flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        step()


def part_of(stack: str) -> str:
    """Return the part of a step that a sampled stack belongs to."""
    frames = stack.split(";")
    is_backward = any("run_backward" in frame for frame in frames)
    if any("_single (torch/distributed" in frame or "c10d" in frame for frame in frames):
        return "collectives"
    if any(re.match(r"Engine\.step|.*\(torch/optim/|Optimizer\.", frame) for frame in frames):
        return "step"
    own = [frame for frame in frames if "zeroengine/" in frame]
    if own and not own[-1].startswith(("Backward.run ", "Engine.__call__ ")):
        file = own[-1].rpartition("(")[2]
        return next((part for begin, part in FILES.items() if file.startswith(begin)), "hooks")
    for frame in reversed(frames):
        if "torch/distributed/" in frame:
            return "FSDP2"
        if "workload.py" in frame or "run_backward" in frame:
            break
    return "torch, backward" if is_backward else "torch, forward"


def measure(case: str, seconds: float) -> dict[str, float]:
    """Return the microseconds per block of each part of a step."""
    command = [sys.executable, __file__, "--run", case, "--seconds", str(seconds + 5)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    total = float(child.stdout.readline())
    with tempfile.NamedTemporaryFile("r") as file:
        sampler = ["py-spy", "record", "--native", "--rate", "250", "--duration", str(int(seconds)), "--format", "raw"]
        subprocess.run([*sampler, "--output", file.name, "--pid", str(child.pid)], check=True, capture_output=True)
        counts: Counter[str] = Counter()
        for line in file:
            stack, _, count = line.rpartition(" ")
            counts[part_of(stack)] += int(count)
    child.kill()
    child.wait()
    return {part: total * counts[part] / counts.total() for part in PARTS if counts[part]}


def bars(figures: dict[str, dict[str, float]], variant: int, colors: Colors) -> Iterator[str]:
    """Yield the bar of each case, and the legend."""
    scale = 560 / max(sum(parts.values()) for parts in figures.values())
    for row, (case, parts) in enumerate(figures.items()):
        x, y = 150.0, 64 + 34 * row
        weight = 600 if case == "engine" else 400
        yield text(16, y + 15, CASES[case], colors.text, weight=weight)
        for part, microseconds in parts.items():
            yield rectangle(x, y, microseconds * scale, 20, PARTS[part][variant], 0)
            x += microseconds * scale
        yield text(x + 8, y + 15, f"{sum(parts.values()):.0f} µs", colors.text, weight=weight)
    for number, (part, fills) in enumerate(PARTS.items()):
        x, y = 16 + 205 * (number % 4), 64 + 34 * len(figures) + 14 + 24 * (number // 4)
        yield rectangle(x, y, 12, 12, fills[variant])
        yield text(x + 18, y + 11, part, colors.text, 12)


def picture(figures: dict[str, dict[str, float]], variant: int, colors: Colors) -> str:
    """Return the picture as SVG."""
    height = 64 + 34 * len(figures) + 24 * -(-len(PARTS) // 4) + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 {height}" width="840" height="{height}" '
        f'font-family="{FONT}" role="img">',
        "<title>Host time of a transformer block and step at stage 3</title>",
        rectangle(0, 0, 840, height, colors.background, radius=8),
        text(16, 28, "Host time of a transformer block and step at stage 3", colors.text, 15, weight=600),
        text(16, 48, "rank 0 of 64, collectives that move nothing; sampled; shorter is better", colors.faint, 12),
        *bars(figures, variant, colors),
        text(16, height - 14, f"{LAYERS} blocks, torch {torch.__version__}, one CPU thread", colors.faint, 12),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each case is sampled")
    parser.add_argument("--output", type=Path, default=PICTURES, help="the folder of the pictures")
    parser.add_argument("--run", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        run(args.run, args.seconds)
        return
    figures = {case: measure(case, args.seconds) for case in CASES}
    print(f"{'microseconds per block and step':<32}" + "".join(f"{name:>18}" for name in CASES.values()))
    for part in PARTS:
        print(f"{part:<32}" + "".join(f"{figures[case].get(part, 0.0):>18.0f}" for case in CASES))
    print(f"{'all':<32}" + "".join(f"{sum(figures[case].values()):>18.0f}" for case in CASES))
    print(json.dumps(figures))
    for variant, (name, colors) in enumerate(VARIANTS.items()):
        (args.output / f"host-time-{name}.svg").write_text(picture(figures, variant, colors))


if __name__ == "__main__":
    main()
