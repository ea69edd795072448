"""What a step with digests costs beside one without, at each stage.

    zero-launch --nproc 2 --cpu benchmarks/digests.py [--size s] [--stages 0 1 2 3] [--steps 24]

One engine takes digests in every second step, so both kinds of steps alternate in one run. The table has the median
seconds of each kind, and what digests in every 100th step add to a run.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import zeroengine
from benchmarks.workload import ADAMW, CLIP, SIZES, Transformer, batches

WARMUP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="s")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)
    for stage in options.stages:
        torch.manual_seed(0)
        model = Transformer(*SIZES[options.size], options.context)
        config = {
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": ADAMW},
            "zero_optimization": {"stage": stage},
            "digests": {"every": 2},
        }
        engine = zeroengine.initialize(model, None, config)
        if engine.rank == 0 and stage == options.stages[0]:
            numel = sum(param.numel() for param in model.parameters())
            print(
                f"{engine.world_size} ranks on {os.cpu_count()} CPUs, {numel / 1e6:.1f} M parameters; Linux "
                f"{platform.release()}, torch {torch.__version__}, Python {sys.version.split()[0]}\n\n"
                f"{'stage':>5} {'without ms':>10} {'with ms':>8} {'added ms':>8} {'every 100':>9}"
            )
        data, seconds = batches(options.size, engine.rank, options.batch, options.context), ([], [])
        for step in range(WARMUP + options.steps):
            batch, begin = next(data), time.perf_counter()
            engine.backward(engine(*batch))
            engine.step()
            seconds[step % 2].append(time.perf_counter() - begin)
        without, with_digests = (statistics.median(times[WARMUP // 2 :]) for times in seconds)
        added = with_digests - without
        if engine.rank == 0:
            print(
                f"{stage:>5} {without * 1e3:>10.1f} {with_digests * 1e3:>8.1f} {added * 1e3:>8.1f} "
                f"{added / without / 100:>9.2%}",
                flush=True,
            )
        engine.close()


if __name__ == "__main__":
    main()
