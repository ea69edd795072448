"""Measures offloading beside no offloading, beside the disk itself, and beside DeepSpeed; and the largest model.

    pip install .[bench]; apt install fio
    python benchmarks/offload.py cpu             # a step with "cpu" beside one without
    python benchmarks/offload.py disk PATH       # the update on NVMe beside fio and beside the update in memory
    python benchmarks/offload.py peers PATH      # beside DeepSpeed's NVMe offload
    python benchmarks/offload.py large PATH      # a billion parameters, and their memory

Every ratio comes from one run: the parts take turns for --rounds rounds, and the median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe_machine

GIB, MIB = 2**30, 2**20
LOOPS = 3


def train(engine: str, *options: str, ranks: int = 1, threads: int = 2) -> dict[str, Any]:
    """Run one training in its own processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    workload = str(Path(__file__).with_name("workload.py"))
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "DS_SKIP_CUDA_CHECK": "1"}
    command = [*launch, workload, engine, "--threads", str(threads), *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{engine} {' '.join(options)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def fio(path: str, read: int, written: int) -> float:
    """Return the seconds that fio takes to read and write as many bytes at once, with the same block size and depth."""
    with tempfile.TemporaryDirectory(dir=path) as folder:
        jobs = ["[global]", "direct=1", "bs=1m", "iodepth=32", "ioengine=io_uring", f"directory={folder}", "thread"]
        jobs.append(f"loops={LOOPS}")  # as states are read and written again and again
        for kind, nbytes in (("read", read), ("write", written)):
            if nbytes:
                size = max(nbytes // MIB, 1)
                jobs += [f"[{kind}]", f"rw={kind}", f"size={size}m", f"filename={kind}"]
                # Written before, as ours are: a hole is read without the disk, and written with more than the data.
                noise = os.urandom(16 * MIB)
                with open(Path(folder, kind), "wb") as file:
                    for start in range(0, size * MIB, len(noise)):
                        file.write(noise[: size * MIB - start])
                    file.flush()
                    os.fsync(file.fileno())
        script = Path(folder, "job.fio")
        script.write_text("\n".join(jobs) + "\n")
        done = subprocess.run(["fio", "--output-format=json", str(script)], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout[done.stdout.index("{") :])
        return max(max(job["read"]["runtime"], job["write"]["runtime"]) for job in found["jobs"]) / 1000 / LOOPS


def cpu(args: argparse.Namespace) -> None:
    ratios = []
    for _ in range(args.rounds):
        common = ("--stage", "3", "--size", args.size, "--steps", str(args.steps))
        plain = train("zeroengine", *common, ranks=2, threads=1)
        away = train("zeroengine", *common, "--offload", "cpu", ranks=2, threads=1)
        ratios.append(away["tokens_per_s"] / plain["tokens_per_s"])
    print(f'tokens/s with "cpu" over without, stage 3, 2 ranks: {statistics.median(ratios):.2f} {show(ratios)}')


def disk(args: argparse.Namespace) -> None:
    rows: dict[str, list[float]] = {"update": [], "step": []}
    for _ in range(args.rounds):
        common = ("--stage", "3", "--size", args.size, "--steps", str(args.steps), "--batch", "1")
        here = train("zeroengine", *common)
        away = train("zeroengine", *common, "--offload", "nvme", "--nvme-path", args.path)
        for what, ours, compute, read, written in (
            ("update", away["update_s"], here["update_s"], away["update_read"], away["update_written"]),
            ("step", away["step_s"], here["step_s"], away["step_read"], away["step_written"]),
        ):
            pure = fio(args.path, int(read), int(written))
            rows[what].append(ours / max(pure, compute))
            print(
                f"{what}: {ours:.2f} s; disk alone {pure:.2f} s for {read / GIB:.2f} GiB read and "
                f"{written / GIB:.2f} GiB written; in memory {compute:.2f} s"
            )
    for what, ratios in rows.items():
        print(f"{what} over the longer of the two: {statistics.median(ratios):.2f} {show(ratios)}")


def peers(args: argparse.Namespace) -> None:
    ratios, peaks = [], []
    for _ in range(args.rounds):
        common = ("--stage", "3", "--size", args.size, "--steps", str(args.steps), "--batch", "1")
        nvme = ("--offload", "nvme", "--nvme-path", args.path)
        if args.dtype != "fp32":
            common += ("--dtype", args.dtype)
        ours, theirs = train("zeroengine", *common, *nvme), train("deepspeed", *common, *nvme)
        ratios.append(theirs["step_s"] / ours["step_s"])
        peaks.append((ours["peak_mib"], theirs["peak_mib"]))
        for name, found in (("zeroengine", ours), ("DeepSpeed", theirs)):
            print(f"{name}: {found['step_s']:.2f} s a step, {found['peak_mib']:.0f} MiB at the peak")
    print(f"steps per second over DeepSpeed's: {statistics.median(ratios):.2f} {show(ratios)}")


def large(args: argparse.Namespace) -> None:
    options = ("--stage", "3", "--size", args.size, "--steps", str(args.steps), "--warmup", "1", "--batch", "1")
    options += ("--context", "64", "--offload", "nvme", "--nvme-path", args.path, "--meta", "--dtype", args.dtype)
    found = train("zeroengine", *options)
    print(json.dumps(found))
    print(
        f"a step takes {found['step_s']:.1f} s; {found['nvme_mib'] / 1024:.1f} GiB of states on disk, "
        f"{found['accounted_mib']:.0f} MiB accounted in memory, {found['peak_mib']:.0f} MiB at the peak"
    )


def show(ratios: list[float]) -> str:
    return f"({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["cpu", "disk", "peers", "large"])
    parser.add_argument("path", nargs="?", default=".", help="a folder on the disk to measure")
    parser.add_argument("--size", help="xs, s (30 M parameters), m (110 M), b (a billion) or 3b; m, and b for `large`")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    args.size = args.size or ("b" if args.part == "large" else "m")
    print(f"{describe_machine()}; {args.part}, size {args.size}")
    {"cpu": cpu, "disk": disk, "peers": peers, "large": large}[args.part](args)


if __name__ == "__main__":
    main()
