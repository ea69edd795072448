"""Compares how two checkouts train: losses, gradient norms, checkpoints and memory, to the last bit.

    python benchmarks/same_numbers.py OTHER_CHECKOUT [--ranks 1 2 3] [--steps 20] [--nvme PATH]

Each checkout trains a small transformer at stages 0 to 3, in fp32, bf16 and fp16, with states in memory and on NVMe,
and saves a checkpoint of each run. The table counts the equal results; below it every difference is listed by name. The
exit code is 1 if there is any. Both must have been built (`python setup.py build_ext --inplace`).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STAGES = (0, 1, 2, 3)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
ACCUMULATION = 2

Run = dict[str, Any]  # what one run of training gave, by what it is


def record(steps: int, nvme: str, out: Path) -> None:
    """Train everything on one rank, and write the results. This runs in the checkout that PYTHONPATH names."""
    import numpy
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from workload import Transformer, batches

    import zeroengine

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Run] = {}
    for stage, precision, place in itertools.product(STAGES, PRECISIONS, ("memory", "nvme")):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        model = Transformer(layers=3, width=48, heads=4, vocab=97, context=16)
        zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 100}
        if place == "nvme":
            sections = ["offload_optimizer", *(["offload_param"] if stage == 3 else [])]
            zero |= {section: {"device": "nvme", "nvme_path": nvme} for section in sections}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 1.0,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
            **PRECISIONS[precision],
        }
        engine = zeroengine.initialize(model, config=config)
        data = batches("s", dist.get_rank(), 2, 16)
        losses, norms = [], []
        for _ in range(steps * ACCUMULATION):
            ids, labels = (part % 97 for part in next(data))
            loss = engine(ids, labels)
            engine.backward(loss)
            if engine.step():
                norms.append(float(engine.grad_norm or 0.0).hex())
            losses.append(loss.item().hex())
        memory = engine.memory()  # of buckets there may be more or fewer, as the ranks meet
        states = {name: getattr(memory, name) for name in ("parameters", "gradients", "master", "optimizer")}
        with tempfile.TemporaryDirectory(dir=nvme) as folder:
            folder = share(folder)
            engine.save_checkpoint(folder, "a")
            dist.barrier()
            whole = Path(folder, f"{dist.get_rank()}.pt")
            # Files may differ in more than the values that torch reads from them.
            dcp_to_torch_save(Path(folder, "a"), whole)
            values = torch.load(whole, weights_only=False)
            checkpoint = {
                name: hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
                for name, value in values.items()
                if isinstance(value, torch.Tensor)
            }
            assert checkpoint
            dist.barrier()
        engine.close()
        found[f"stage {stage}, {precision}, {place}"] = {
            "losses": losses,
            "gradient norms": norms,
            "memory": [states, dict(memory.cpu), dict(memory.nvme)],
            "checkpoint": checkpoint,
        }
    path = out.with_name(f"{out.name}.{dist.get_world_size()}.{dist.get_rank()}")
    path.write_text(json.dumps(found))
    dist.destroy_process_group()


def share(value: str) -> str:
    """Return rank 0's value."""
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def train(checkout: Path, ranks: int, steps: int, nvme: str, out: Path) -> dict[str, Run]:
    """Return what each rank recorded in ``checkout``, by rank and run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    worker = [str(Path(__file__).resolve()), "--record", str(out), "--steps", str(steps), "--nvme", nvme]
    paths = [str(checkout), str(Path(__file__).resolve().parent)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *worker, "."], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{checkout} on {ranks} ranks failed:\n{done.stderr[-4000:]}")
    found = {}
    for rank in range(ranks):
        recorded = json.loads(out.with_name(f"{out.name}.{ranks}.{rank}").read_text())
        found |= {f"{ranks} ranks, rank {rank}, {name}": run for name, run in recorded.items()}
    return found


def compare(one: dict[str, Run], other: dict[str, Run]) -> tuple[Counter[str], list[str]]:
    """Return the number of equal results of each kind, and the differences."""
    equal: Counter[str] = Counter()
    differences = [f"{name}: only one of the two has it" for name in sorted(one.keys() ^ other.keys())]
    for name in sorted(one.keys() & other.keys()):
        for kind in one[name]:
            if one[name][kind] == other[name].get(kind):
                equal[kind] += 1
            else:
                differences.append(f"{name}: {kind} differ")
    return equal, differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--nvme", default=tempfile.gettempdir(), metavar="PATH", help="a folder on a disk")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record is not None:
        record(options.steps, options.nvme, options.record)
        return 0
    equal: Counter[str] = Counter()
    differences: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            runs = [
                train(checkout.resolve(), ranks, options.steps, options.nvme, Path(folder, name))
                for name, checkout in (("one", ROOT), ("other", options.other))
            ]
            some, more = compare(*runs)
            equal += some
            differences += more
            print(f"{ranks} ranks: {sum(some.values())} equal, {len(more)} different", flush=True)
    for kind, count in equal.items():
        print(f"{kind:<16}{count:>6} equal")
    print("\n".join(differences))
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
