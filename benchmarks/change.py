"""Measures `engine.change` beside a save and a load of the same states, and the memory that a change takes.

    python benchmarks/change.py --size m --ranks 2 --rounds 5

For each pair of stages the same engine changes, and then saves a checkpoint that a new engine of the other stage loads:
what a user would do without `change`. Peaks are of the proportional memory of both ranks (PSS), read every few
milliseconds while states move, above the larger of the memory before and after; a unit's bytes stand beside them.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import zeroengine  # noqa: E402
from benchmarks.workload import SIZES, Transformer  # noqa: E402

MIB = 2**20
PAIRS = ((3, 1), (1, 3), (3, 0), (0, 3), (2, 3))


def held_bytes() -> int:
    """Return the proportional memory of this process, in which ranks share what they share."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """Yield a list that has the largest memory of this process inside, at its end."""
    largest, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.003):
            largest[0] = max(largest[0], held_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield largest
    finally:
        is_over.set()
        thread.join()


def make_engine(size: str, stage: int) -> zeroengine.Engine:
    model = Transformer(*SIZES[size], 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return zeroengine.initialize(model, optimizer, configuration(stage))


def configuration(stage: int) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}


def step(engine: zeroengine.Engine) -> None:
    ids = torch.arange(128).remainder(64)[None]
    engine.backward(engine(ids, ids))
    engine.step()


def measure(size: str, rounds: int, folder: Path) -> None:
    # The lines that say how an engine is set up stay away.
    logging.basicConfig(level=logging.ERROR)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for before, after in PAIRS:
        seconds: dict[str, list[float]] = {"change": [], "save and load": []}
        extra = []
        for number in range(rounds):
            engine = make_engine(size, before)
            step(engine)
            # The first change imports and allocates what later ones have.
            dist.barrier()
            held, began = held_bytes(), time.perf_counter()
            with watched_memory() as largest:
                engine.change(configuration(after))
            seconds["change"].append(time.perf_counter() - began)
            extra.append(largest[0] - max(held, held_bytes()))
            engine.change(configuration(before))
            dist.barrier()
            began = time.perf_counter()
            engine.save_checkpoint(folder, f"{before}-{after}-{number}")
            engine.close()
            del engine
            engine = make_engine(size, after)
            engine.load_checkpoint(folder)
            seconds["save and load"].append(time.perf_counter() - began)
            engine.close()
            del engine
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder)
            dist.barrier()
        if rank == 0:
            changes, loads = (statistics.median(seconds[way]) for way in seconds)
            ratio = statistics.median(c / s for c, s in zip(*seconds.values(), strict=True))
            print(
                f"| {before} to {after} | {changes:.2f} s | {loads:.2f} s | {ratio:.2f} | "
                f"{statistics.median(extra) / MIB:.0f} MiB |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="s", help="of the model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of each pair; a row is their median")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoints; default: a temporary one")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments.size, arguments.rounds, arguments.folder)
        return
    model = Transformer(*SIZES[arguments.size], 128)
    unit = max(sum(p.nbytes for p in block.parameters()) for block in [*model.blocks, model.tokens])
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, size {arguments.size}, "
        f"{arguments.ranks} ranks; the largest unit takes about {unit / MIB:.0f} MiB\n"
    )
    print(
        "| stages | change | save, new engine, load | ratio | memory above the larger partitioning |\n"
        "|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.folder or Path(folder) / "checkpoints"
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={arguments.ranks}", __file__]
        command += ["--size", arguments.size, "--rounds", str(arguments.rounds), "--folder", str(path)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
