"""Measures how long training takes to start: from the command to the end of the first step, and to the process's end.

    python benchmarks/start.py [--rounds 7] [--ranks 2] [--launcher zero-launch] [--other ../other-checkout]

Every run launches the ranks anew, trains a small model for one step with AdamW, and ends. The engines take turns for
--rounds rounds; the table has medians. A phase counts from the end of the one before it on rank 0. Beside the seconds
on the clock stand the seconds of CPU time of the launcher and all ranks, which other work on the machine changes less.
The imports of an engine count as its own even where a script would import the same for other reasons. "engine" is what
is neither the launcher's nor the import of torch: from that import to the end of the first step.

With --other the engine of another checkout has rows of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ["ddp:0", "fsdp2:3", "deepspeed:0", "deepspeed:3", "zeroengine:0", "zeroengine:3"]
PHASES = ["launch", "torch", "import", "group", "initialize", "step", "end"]
SIZE, CONTEXT = "xs", 32


def train(engine: str, stage: int, out: Path) -> None:
    """Run one rank, and write the times at which its phases end."""
    begin, marks = float(os.environ["START_BENCHMARK_BEGIN"]), {}

    def mark(phase: str) -> None:
        marks[phase] = time.time() - begin

    mark("launch")
    import torch
    import torch.distributed as dist

    mark("torch")
    if engine == "zeroengine":
        import zeroengine  # noqa: F401
    elif engine == "deepspeed":
        import deepspeed  # noqa: F401
    elif engine == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh  # noqa: F401
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    mark("import")
    dist.init_process_group("gloo")
    mark("group")
    import workload

    torch.manual_seed(0)
    make: Callable[..., workload.Step] = workload.torch_step
    if engine in ("zeroengine", "deepspeed"):
        make = {"zeroengine": workload.zeroengine_step, "deepspeed": workload.deepspeed_step}[engine]
    model = workload.Transformer(*workload.SIZES[SIZE], CONTEXT)
    options = argparse.Namespace(
        engine=engine, stage=stage, batch=1, dtype="fp32", optimizer="AdamW", offload="none", nvme_path=None
    )
    step = make(model, options, workload.batches(SIZE, dist.get_rank(), 1, CONTEXT))
    mark("initialize")
    loss = step().item()
    mark("step")
    if dist.get_rank() == 0:
        out.write_text(json.dumps({**marks, "loss": loss}))
    dist.barrier()  # without it a process of DeepSpeed may abort when it ends
    dist.destroy_process_group()


def run(engine: str, root: Path, args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of each phase of one run, of all until the first step, and of CPU time."""
    name, _, stage = engine.partition(":")
    launch = ["torch.distributed.run", "--nproc_per_node", str(args.ranks), "--master_port", str(free_port())]
    if args.launcher == "zero-launch":
        launch = ["zeroengine.cli.zero_launch", "--nproc", str(args.ranks)]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "marks.json")
        command = [sys.executable, "-m", *launch, __file__, "--rank", name, stage or "0", str(out)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_SKIP_CUDA_CHECK": "1", "PYTHONPATH": os.pathsep.join(paths)}
        # Installed packages are compiled, and so are the sources of a checkout after the first round.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        used, begin = cpu_seconds(), time.time()
        env["START_BENCHMARK_BEGIN"] = repr(begin)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, cwd=folder)
        end = time.time() - begin
        if done.returncode or not out.exists():
            raise SystemExit(f"{engine} failed:\n{done.stderr[-3000:]}")
        marks: dict[str, float] = json.loads(out.read_text())
    marks["end"] = end
    ends = [0.0, *(marks[phase] for phase in PHASES)]
    phases = {phase: after - before for phase, before, after in zip(PHASES, ends, ends[1:], strict=False)}
    phases["engine"] = sum(phases[phase] for phase in ("import", "group", "initialize", "step"))
    return phases | {"to the step": marks["step"], "whole": end, "CPU": cpu_seconds() - used, "loss": marks["loss"]}


def cpu_seconds() -> float:
    """Return the CPU time of all processes that have ended here."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def free_port() -> int:
    """Return a port for rank 0."""
    import socket

    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launcher", choices=["torchrun", "zero-launch"], default="torchrun")
    parser.add_argument("--only", nargs="*", help="engines as name:stage")
    parser.add_argument("--other", type=Path, help="another checkout, whose engine also takes part")
    parser.add_argument("--rank", nargs=3, metavar=("ENGINE", "STAGE", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        train(args.rank[0], int(args.rank[1]), Path(args.rank[2]))
        return
    engines = args.only or [name for name in ENGINES if find_spec("deepspeed") or not name.startswith("deepspeed")]
    cases = {engine.replace(":", " stage "): (engine, ROOT) for engine in engines}
    if args.other is not None:
        other = {f"other {name}": (engine, args.other.resolve()) for name, (engine, _) in cases.items()}
        cases |= {name: case for name, case in other.items() if case[0].startswith("zeroengine")}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(args.rounds + 1):
        for name, (engine, root) in cases.items():
            result = run(engine, root, args)
            if number:  # the first round fills the caches of files and of compiled extensions
                measured[name].append(result)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    show(measured, args)


def show(measured: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> None:
    """Print the medians, and the ratios of each case to zeroengine at the same stage or at the only one."""
    from machine import describe_machine

    def median(rows: list[dict[str, float]], key: str) -> float:
        return statistics.median(row[key] for row in rows)

    print(f"{describe_machine()}; {args.launcher}, {args.ranks} ranks, {args.rounds} rounds; seconds, medians")
    columns: list[Any] = [*PHASES, "engine", "to the step", "lowest", "highest", "whole", "CPU"]
    print("| engine | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 1) + "|")
    for name, rows in measured.items():
        until = [row["to the step"] for row in rows]
        figures = [*(median(rows, key) for key in (*PHASES, "engine", "to the step")), min(until), max(until)]
        figures += [median(rows, "whole"), median(rows, "CPU")]
        print(f"| {name} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")
    print("\n| zeroengine / | engine | to the step | whole | CPU |\n|---|---|---|---|---|")
    for name, rows in measured.items():
        own = measured.get(f"zeroengine stage {name[-1]}")
        if own and own is not rows:
            ratios = (
                statistics.median(a[key] / b[key] for a, b in zip(own, rows, strict=True))
                for key in ("engine", "to the step", "whole", "CPU")
            )
            print(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


if __name__ == "__main__":
    main()
