"""Compares loss curves of the example in low precision with those of plain PyTorch's autocast.

Each precision trains the same model on the same batches, once for each seed of weights and batches. The curves of plain
autocast give the spread between runs. The curves of the other precisions are compared with them, seed by seed.

    python benchmarks/curves.py --steps 200

With several ranks it compares quantized communication with exact communication, which needs peers:

    zero-launch --cpu --nproc 2 benchmarks/curves.py --steps 200

With ``--local-steps`` it compares replicas of one rank, which exchange their parameters now and then, with a run whose
ranks take every step together:

    zero-launch --cpu --nproc 2 benchmarks/curves.py --local-steps --steps 400
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroengine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train_lm import GPT, draw, read_text

ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
WINDOW = 20  # steps that one point of a curve averages
OURS: dict[str, dict[str, Any]] = {
    "zeroengine fp32": {},
    "zeroengine bf16": {"bf16": {"enabled": True}},
    "zeroengine fp16": {"fp16": {"enabled": True}},
    "zeroengine bf16, moments in bf16": {"bf16": {"enabled": True}, "optimizer_state_dtype": "bf16"},
    "zeroengine fp32, moments in int8": {"optimizer_state_dtype": "int8"},
    "zeroengine bf16, moments in int8": {"bf16": {"enabled": True}, "optimizer_state_dtype": "int8"},
    "zeroengine bf16 without masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "the same, moments in bf16": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "optimizer_state_dtype": "bf16",
    },
    "the same, moments in int8": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "optimizer_state_dtype": "int8",
    },
}
GRADIENTS: dict[str, Any] = {"zero_quantized_gradients": True}
FOUR_BITS: dict[str, Any] = GRADIENTS | {"quantized_gradient_bits": 4}
QUANTIZED: dict[str, dict[str, Any]] = {
    "exact": {},
    "weights 8 bits": {"zero_quantized_weights": True},
    "gradients 8 bits": GRADIENTS,
    "weights and gradients 8 bits": {"zero_quantized_weights": True} | GRADIENTS,
    "gradients 4 bits": FOUR_BITS,
    "gradients 4 bits, error feedback": FOUR_BITS | {"zeropp_loco_param": {}},
}


NESTEROV: dict[str, Any] = {"outer": "nesterov", "replica_ranks": 1}
LOCAL_STEPS: dict[str, dict[str, Any]] = {
    "every step together": {},
    "local steps 8, average": {"local_steps": {"steps": 8, "replica_ranks": 1}},
    "local steps 32, average": {"local_steps": {"steps": 32, "replica_ranks": 1}},
    "local steps 8, nesterov": {"local_steps": {"steps": 8, **NESTEROV}},
    "local steps 32, nesterov": {"local_steps": {"steps": 32, **NESTEROV}},
}


def build(seed: int, args: argparse.Namespace) -> GPT:
    torch.manual_seed(seed)
    return GPT(args.layers, args.width, 4, args.context)


def plain(dtype: torch.dtype | None, seed: int, text: torch.Tensor, args: argparse.Namespace) -> list[float]:
    model = build(seed, args)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses = []
    for step in range(args.steps):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(*draw(text, args.batch, args.context, seed * 10**6 + step))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ours(more: dict[str, Any], seed: int, text: torch.Tensor, args: argparse.Namespace) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }
    config |= more
    config["zero_optimization"] = {"stage": 3, **more.get("zero_optimization", {})}
    engine = zeroengine.initialize(build(seed, args), config=config)
    losses = []
    for step in range(args.steps):
        # Each rank has batches of its own.
        batch = seed * 10**6 + step * engine.world_size + engine.rank
        loss = engine(*draw(text, args.batch, args.context, batch))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    engine.close()
    means = torch.stack(losses)
    if engine.world_size > 1:
        dist.all_reduce(means)
    return (means / engine.world_size).tolist()


def compare_with_exact(sections: dict[str, dict[str, Any]], text: torch.Tensor, args: argparse.Namespace) -> None:
    """Print how far the curves of configurations are from those of the first, which trains exactly."""
    seeds = range(args.seeds)
    curves = {name: [ours(section, seed, text, args) for seed in seeds] for name, section in sections.items()}
    if dist.get_rank() != 0:
        return
    exact = next(iter(curves.values()))
    spread = [apart(exact[i], exact[j]) for i in seeds for j in range(i)]
    ranks = dist.get_world_size()
    print(f"{ranks} ranks, {args.steps} steps, {args.seeds} seeds; averaged over {WINDOW} steps, in nats per byte")
    print(f"run-to-run spread of exact training: {min(spread):.4f} to {max(spread):.4f}" if spread else "")
    print(f"{'':<34} {'middle':>10} {'last point':>10} {'from exact':>11}")
    for name, runs in curves.items():
        points = [smoothed(run) for run in runs]
        middle = statistics.mean(curve[len(curve) // 2] for curve in points)
        last = statistics.mean(curve[-1] for curve in points)
        distance = max(apart(run, other) for run, other in zip(runs, exact, strict=True))
        print(f"{name:<34} {middle:>10.4f} {last:>10.4f} {distance:>11.4f}")


def smoothed(losses: list[float]) -> list[float]:
    return [statistics.mean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]


def apart(first: list[float], second: list[float]) -> float:
    """Return the largest distance of two smoothed curves, in nats."""
    return max(abs(a - b) for a, b in zip(smoothed(first), smoothed(second), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--local-steps", action="store_true", help="compare replicas that train apart")
    args = parser.parse_args()
    text, _ = read_text(None, args.context)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Small units would stay gathered, and so be exact.
        quantized = {
            name: {"zero_optimization": {"param_persistence_threshold": 0, **zero}} for name, zero in QUANTIZED.items()
        }
        return compare_with_exact(LOCAL_STEPS if args.local_steps else quantized, text, args)
    seeds = range(args.seeds)
    curves: dict[str, list[list[float]]] = {}
    for name, dtype in {
        "plain fp32": None,
        "plain autocast bf16": torch.bfloat16,
        "plain autocast fp16": torch.float16,
    }.items():
        curves[name] = [plain(dtype, seed, text, args) for seed in seeds]
        print(".", end="", file=sys.stderr, flush=True)
    for name, more in OURS.items():
        curves[name] = [ours(more, seed, text, args) for seed in seeds]
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    spread = [
        apart(curves["plain autocast bf16"][i], curves["plain autocast bf16"][j]) for i in seeds for j in range(i)
    ]
    print(f"{args.steps} steps, {args.seeds} seeds; curves averaged over {WINDOW} steps, in nats per byte")
    print(f"run-to-run spread of plain autocast bf16: {min(spread):.4f} to {max(spread):.4f}")
    print(f"{'':<34} {'last point':>10} {'from plain fp32':>16} {'from autocast bf16':>19}")
    for name, runs in curves.items():
        last = statistics.mean(smoothed(run)[-1] for run in runs)
        distances = [
            max(apart(run, other) for run, other in zip(runs, curves[base], strict=True))
            for base in ("plain fp32", "plain autocast bf16")
        ]
        print(f"{name:<34} {last:>10.4f} {distances[0]:>16.4f} {distances[1]:>19.4f}")


if __name__ == "__main__":
    main()
