"""Trains the language model of the example under AdamW and under Muon, and draws the curves of docs/optimizers.md.

    python benchmarks/optimizers.py              # draw docs/assets/optimizers-light.svg and optimizers-dark.svg
    python benchmarks/optimizers.py --measure    # train first, and write benchmarks/optimizers.json: four idle minutes

Both optimizers train with three learning rates, on the same batches. The best rate of each trains with further seeds of
weights and batches. Muon's best rate trains with an iteration in fp32 as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import zeroengine

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
from readme_picture import FONT, PICTURES, VARIANTS, Colors, rectangle, text  # noqa: E402
from train_lm import GPT, draw, read_text, sample  # noqa: E402

FIGURES = ROOT / "benchmarks" / "optimizers.json"
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 96, 4, 64, 16
STEPS, EVERY, WARMUP, SHORT = 300, 20, 30, 200
SEEDS = 3
RATES = {"AdamW": (1e-3, 3e-3, 1e-2), "Muon": (1e-2, 3e-2, 1e-1)}
HELD_OUT_BATCHES = 16
SHARED: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
MUON = SHARED | {"adjust_lr_fn": "match_rms_adamw", "matrices": {"*.qkv.weight": 3}}
SCHEDULE = {"total_num_steps": STEPS, "warmup_num_steps": WARMUP, "warmup_type": "linear", "warmup_max_lr": "auto"}
# By the name in the figures: the type and its parameters.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", SHARED),
    "Muon": ("Muon", MUON),
    "Muon, iteration in fp32": ("Muon", MUON | {"ns_dtype": "fp32"}),
}

# Sizes in pixels of the two panels.
PANELS = ((62, 470), (580, 244))
TOP, PANEL_HEIGHT, PICTURE = 72, 250, (840, 376)
LOWEST, HIGHEST = 1.6, 3.0  # nats


def train(
    name: str, rate: float, seed: int, words: tuple[torch.Tensor, torch.Tensor], steps: int = STEPS
) -> dict[str, Any]:
    """Train the model for some steps of the schedule, and return its held-out losses after every ``EVERY`` steps."""
    kind, params = OPTIMIZERS[name]
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": kind, "params": {**params, "lr": rate}},
        "scheduler": {"type": "WarmupDecayLR", "params": SCHEDULE},
    }
    torch.manual_seed(seed)
    engine = zeroengine.initialize(GPT(LAYERS, WIDTH, HEADS, CONTEXT), config=config)
    learned, held_out = words
    starts = torch.linspace(0, len(held_out) - CONTEXT - 1, HELD_OUT_BATCHES * BATCH).long()
    losses = []
    for step in range(1, steps + 1):
        engine.backward(engine(*draw(learned, BATCH, CONTEXT, seed * 10**6 + step)))
        engine.step()
        if step % EVERY == 0:
            engine.eval()
            with torch.no_grad():
                parts = [engine(*sample(held_out, chunk, CONTEXT)).item() for chunk in starts.split(BATCH)]
            engine.train()
            losses.append(round(statistics.mean(parts), 4))
    engine.close()
    print(f"{name}, rate {rate:g}, seed {seed}: {losses[-1]:.4f}", flush=True)
    return {"optimizer": name, "rate": rate, "seed": seed, "losses": losses}


def measure() -> list[dict[str, Any]]:
    words = read_text(None, CONTEXT)
    runs = [train(name, rate, 0, words) for name, rates in RATES.items() for rate in rates]
    best = {name: best_rate(runs, name) for name in RATES}
    runs += [train(name, rate, seed, words) for seed in range(1, SEEDS) for name, rate in best.items()]
    return runs + [train("Muon, iteration in fp32", best["Muon"], seed, words, SHORT) for seed in range(SEEDS)]


def best_rate(runs: list[dict[str, Any]], name: str) -> float:
    """Return the rate of the optimizer's lowest last loss, of the first seed."""
    own = [run for run in runs if run["optimizer"] == name and run["seed"] == 0]
    rate: float = min(own, key=lambda run: run["losses"][-1])["rate"]
    return rate


def best_runs(runs: list[dict[str, Any]], name: str) -> list[list[float]]:
    """Return the losses of an optimizer at its best rate, by seed."""
    rate = best_rate(runs, name)
    return [run["losses"] for run in runs if (run["optimizer"], run["rate"]) == (name, rate)]


def report(runs: list[dict[str, Any]]) -> None:
    """Print what the page says in words."""
    print(f"held-out loss in nats per byte after {STEPS} steps of {BATCH * CONTEXT} tokens")
    for name in OPTIMIZERS:
        curves = best_runs(runs, name)
        last = [curve[-1] for curve in curves]
        searched = {r["rate"]: r["losses"][-1] for r in runs if r["optimizer"] == name and r["seed"] == 0}
        print(
            f"{name:<24} rate {best_rate(runs, name):g}: {statistics.mean(last):.4f} ({min(last):.4f} to "
            f"{max(last):.4f}); by rate {searched}"
        )
    goal = statistics.mean(curve[-1] for curve in best_runs(runs, "AdamW"))
    means = [statistics.mean(values) for values in zip(*best_runs(runs, "Muon"), strict=True)]
    reached = EVERY * next(number for number, loss in enumerate(means, 1) if loss <= goal)
    print(f"Muon reaches AdamW's last loss after {reached} steps")
    point = SHORT // EVERY - 1
    pairs = zip(best_runs(runs, "Muon"), best_runs(runs, "Muon, iteration in fp32"), strict=True)
    apart = [round(bf16[point] - fp32[point], 4) for bf16, fp32 in pairs]
    spread = [curve[point] for curve in best_runs(runs, "Muon")]
    print(f"step {SHORT}: bf16 less fp32 by seed {apart}; between seeds {max(spread) - min(spread):.4f}")


def level(loss: float) -> float:
    """Return the height of a loss in the picture."""
    return TOP + PANEL_HEIGHT * (HIGHEST - min(loss, HIGHEST)) / (HIGHEST - LOWEST)


def line(points: list[tuple[float, float]], color: str, width: float = 2.0, dashes: str = "") -> str:
    """Return a line through some points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dashed}/>'


def axes(colors: Colors) -> Iterator[str]:
    """Yield the losses at the left of each panel, and their lines."""
    for left, width in PANELS:
        for tenth in range(round(LOWEST * 10) + 2, round(HIGHEST * 10) + 1, 4):
            y = level(tenth / 10)
            yield line([(left, y), (left + width, y)], colors.grid, 1)
            yield text(left - 8, y + 4, f"{tenth / 10:.1f}", colors.faint, 12, "end")


def panels(runs: list[dict[str, Any]], colors: Colors) -> Iterator[str]:
    """Yield the curves of both optimizers, and their last losses at each rate."""
    bottom = TOP + PANEL_HEIGHT + 20
    (left, width), (right, right_width) = PANELS
    for step in range(0, STEPS + 1, 100):
        yield text(left + width * step / STEPS, bottom, str(step), colors.faint, 12, "middle")
    rates = sorted({rate for tried in RATES.values() for rate in tried})
    places = {rate: right + right_width * (0.5 + index) / len(rates) for index, rate in enumerate(rates)}
    for rate, x in places.items():
        yield text(x, bottom, f"{rate:g}", colors.faint, 12, "middle")
    for name, color, dashes, offset in (("AdamW", colors.faint, "5 3", -12), ("Muon", colors.own, "", 18)):
        curves = best_runs(runs, name)
        at = [left + width * EVERY * (index + 1) / STEPS for index in range(len(curves[0]))]
        for curve in curves:
            shown = [(x, level(loss)) for x, loss in zip(at, curve, strict=True) if loss <= HIGHEST]
            yield line(shown, color, 1.6, dashes)
        x, y = shown[len(shown) // 2]
        label = f"{name}, rate {best_rate(runs, name):g}"
        yield text(x, y + offset * 1.6, label, color, weight=600, anchor="end" if offset > 0 else "start")
        last = [
            (places[run["rate"]], level(run["losses"][-1]))
            for run in runs
            if run["optimizer"] == name and run["seed"] == 0
        ]
        yield line(last, color, 1.6, dashes)
        for x, y in last:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>'


def picture(runs: list[dict[str, Any]], colors: Colors) -> str:
    """Return the picture as SVG."""
    width, height = PICTURE
    left, right = PANELS[0][0], PANELS[1][0]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{FONT}" role="img">',
        "<title>Held-out losses under AdamW and Muon</title>",
        rectangle(0, 0, width, height, colors.background, radius=8),
        text(left, 28, "Held-out loss by step, nats per byte", colors.text, 15, weight=600),
        text(left, 48, f"the best learning rate of each, {SEEDS} seeds", colors.faint, 12),
        text(right, 28, "Last loss by rate", colors.text, 15, weight=600),
        text(right, 48, "one seed", colors.faint, 12),
        *axes(colors),
        *panels(runs, colors),
        text(left, height - 12, "GPT of the example, 0.50 M parameters, 1,024 bytes a step, on CPU.", colors.faint, 12),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="train first")
    args = parser.parse_args()
    if args.measure:
        rows = ",\n".join(json.dumps(run) for run in measure())
        FIGURES.write_text(f"[\n{rows}\n]\n")
    runs = json.loads(FIGURES.read_text())
    report(runs)
    for name, colors in VARIANTS.items():
        (PICTURES / f"optimizers-{name}.svg").write_text(picture(runs, colors))


if __name__ == "__main__":
    main()
