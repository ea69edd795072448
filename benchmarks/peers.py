"""Measures training speed and memory beside DDP, FSDP2 and DeepSpeed, as ratios to a floor.

The floor is the same local work on the same ranks without any communication. The engines take turns for --rounds
rounds, each run next to its own floor; the median of the ratios counts. The default is two ranks with one thread each.

    pip install .[bench]
    python benchmarks/peers.py --size s --rounds 5
    python benchmarks/peers.py --size m --optimizer Muon --only ddp:0 deepspeed:2 deepspeed:3 zeroengine:2 zeroengine:3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from machine import describe_machine

ENGINES = ["ddp:0", "fsdp2:2", "fsdp2:3", "deepspeed:1", "deepspeed:2", "deepspeed:3"]
OURS = [f"zeroengine:{stage}" for stage in range(4)]


def run(engine: str, args: argparse.Namespace) -> dict[str, float]:
    """One training run; ``engine`` is ``name:stage``."""
    name, _, stage = engine.partition(":")
    workload = str(Path(__file__).with_name("workload.py"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
    options = ["--stage", stage or "0", "--size", args.size, "--dtype", args.dtype, "--steps", str(args.steps)]
    options += ["--optimizer", args.optimizer, "--batch", str(args.batch), "--context", str(args.context)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_SKIP_CUDA_CHECK": "1"}
    done = subprocess.run([*launch, workload, name, *options], env=env, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{engine} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(lines[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="s", help="xs, s (30 M parameters) or m (110 M)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank and step")
    parser.add_argument("--context", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--optimizer", choices=["AdamW", "Muon"], default="AdamW")
    parser.add_argument("--only", nargs="*", help="engines as name:stage")
    parser.add_argument("--json", type=Path, help="also write the figures into this file")
    args = parser.parse_args()
    engines = args.only or OURS + ENGINES
    ratios: dict[str, list[float]] = {engine: [] for engine in engines}
    peaks: dict[str, list[float]] = {engine: [] for engine in ["floor", *engines]}
    for _ in range(args.rounds):
        floor = run("floor", args)
        for engine in engines:
            result = run(engine, args)
            after = run("floor", args)
            ratios[engine].append(
                result["tokens_per_s"] / statistics.mean((floor["tokens_per_s"], after["tokens_per_s"]))
            )
            peaks[engine].append(result["peak_mib"])
            peaks["floor"].append(after["peak_mib"])
            floor = after
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{describe_machine()}; size {args.size}, {args.dtype}, {args.ranks} ranks, {args.rounds} rounds")
    print(f"{'engine':<14} {'speed/floor':>11} {'min':>6} {'max':>6} {'peak MiB':>9}")
    print(f"{'floor':<14} {'1.00':>11} {'':>6} {'':>6} {statistics.median(peaks['floor']):>9.0f}")
    for engine, values in sorted(ratios.items(), key=lambda item: item[0].partition(":")[2]):
        figures = f"{statistics.median(values):>5.2f} {min(values):>6.2f} {max(values):>6.2f}"
        print(f"{engine.replace(':', ' stage '):<20} {figures} {statistics.median(peaks[engine]):>9.0f}")
    if args.json:
        args.json.write_text(json.dumps(figures_of(args, ratios, peaks), indent=1) + "\n")


def figures_of(
    args: argparse.Namespace, ratios: dict[str, list[float]], peaks: dict[str, list[float]]
) -> dict[str, object]:
    """Return the medians and the ranges, with the settings, the machine and the versions."""
    rows = [
        {
            "engine": engine.partition(":")[0],
            "stage": int(engine.partition(":")[2]),
            "speed": round(statistics.median(values), 3),
            "lowest": round(min(values), 3),
            "highest": round(max(values), 3),
            "peak_mib": round(statistics.median(peaks[engine])),
        }
        for engine, values in ratios.items()
    ]
    settings = {
        key: getattr(args, key)
        for key in ("size", "dtype", "ranks", "rounds", "steps", "batch", "context", "optimizer")
    }
    return {
        "machine": describe_machine(),
        **settings,
        "floor_peak_mib": round(statistics.median(peaks["floor"])),
        "engines": rows,
    }


if __name__ == "__main__":
    main()
