"""Compares the seconds of a step that the planner predicts with those of real runs, on this machine's CPU.

First the machine is measured, with each number of ranks. Then the settings take turns for --rounds rounds; the median
of a setting's runs counts. A run's figure is the median of its steps.

    python benchmarks/plan.py --sizes s m --rounds 3
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from machine import describe_machine
from workload import SIZES, Transformer, json_config

from zeroengine.config import load
from zeroengine.memory.state_bytes import predict_states
from zeroengine.plan.measure import measure
from zeroengine.plan.seconds.machine import Machine, read_machine, save_machine
from zeroengine.plan.seconds.step_time import StepTime, predict_step, topology_of
from zeroengine.plan.trace.activations import trace_micro_step
from zeroengine.plan.trace.model_facts import from_module


class Setting(NamedTuple):
    size: str
    dtype: str
    ranks: int
    stage: int
    offload: str


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    for size, dtype in itertools.product(args.sizes, args.dtypes):
        # In one process every stage is stage 0.
        for ranks, stage in ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3)):
            if ranks in args.ranks:
                yield Setting(size, dtype, ranks, stage, "none")
        for ranks in args.ranks:
            yield Setting(size, dtype, ranks, 3, "nvme")


def predict(setting: Setting, machine: Machine, args: argparse.Namespace) -> StepTime:
    values = {**vars(args), "stage": setting.stage, "dtype": setting.dtype, "offload": setting.offload}
    config = load(json_config(argparse.Namespace(**values))).resolve(world_size=setting.ranks)
    with torch.device("meta"):
        model = Transformer(*SIZES[setting.size], args.context)
    shape = (args.batch, args.context)
    facts = from_module(model, None, lambda _: [torch.zeros(shape, dtype=torch.int64, device="meta") for _ in "ab"])
    micro = trace_micro_step(facts, config, args.batch, checkpointing=False)
    states = predict_states(facts.plans(config), config, topology_of(machine, config))
    return predict_step(facts, config, micro, states, machine)


def run(setting: Setting, args: argparse.Namespace) -> float:
    """Return the seconds of a step of one real run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={setting.ranks}"]
    command += [str(Path(__file__).with_name("workload.py")), "zeroengine", "--stage", str(setting.stage)]
    command += ["--size", setting.size, "--dtype", setting.dtype, "--offload", setting.offload]
    command += ["--nvme-path", args.nvme_path, "--steps", str(args.steps)]
    command += ["--batch", str(args.batch), "--context", str(args.context)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{setting} failed:\n{done.stderr[-2000:]}")
    return float(json.loads(lines[-1])["step_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["s", "m"], choices=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], choices=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank and step")
    parser.add_argument("--context", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--machines", help="folder of the measurements, which are taken where they are not there yet")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir())
    args = parser.parse_args()
    machines = {}
    for ranks in args.ranks:
        file = Path(args.machines or tempfile.mkdtemp()) / f"{ranks}.json"
        if not file.is_file():
            save_machine(measure(ranks=ranks, threads=1, folder=args.nvme_path), file)
        machines[ranks] = read_machine(file)
        print(f"{ranks} ranks: {machines[ranks].rates}", file=sys.stderr)
    seconds: dict[Setting, list[float]] = {setting: [] for setting in settings(args)}
    for _ in range(args.rounds):
        for setting, runs in seconds.items():
            runs.append(run(setting, args))
            print(f"{setting} {runs[-1]:.3f}", file=sys.stderr, flush=True)
    print(f"{describe_machine()}; {args.rounds} rounds of {args.steps} steps, one thread a rank")
    heads = ("predicted", "measured", "ratio", "min", "max", "compute", "gather", "reduce", "update", "offload")
    print(f"{'setting':<28}{''.join(f'{head:>10}' for head in heads)}")
    for setting, runs in seconds.items():
        step = predict(setting, machines[setting.ranks], args)
        measured = statistics.median(runs)
        parts = (step.compute, step.gather, step.reduce, step.update, step.offload)
        figures = (step.total, measured, step.total / measured, min(runs), max(runs), *parts)
        name = f"{setting.size} {setting.dtype} {setting.ranks} ranks stage {setting.stage}"
        print(f"{name + (' nvme' if setting.offload == 'nvme' else ''):<28}{''.join(f'{x:>10.3f}' for x in figures)}")


if __name__ == "__main__":
    main()
