"""Measures the table of ZeRO, section 5: the bytes of a rank at each stage and any world size, in one process.

torch's ``fake`` process group stands in for the other ranks: this process holds what rank 0 of N would hold. For stages
0 to 3 in bf16 mixed precision with Adam, the table has the formula (2 + 2 + 12 bytes per parameter, each divided by its
degree), the result of ``engine.memory()``, and the real growth of this process.

    python benchmarks/memory.py --ranks 64 --layers 24 --width 1024
    python benchmarks/memory.py --ranks 1 --nvme PATH      with the states of stages 2 and 3 on a disk
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.back(F.gelu(self.mix(self.norm(x))))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """12 width^2 parameters a block, as a transformer has, and an embedding."""

    def __init__(self, layers: int, width: int, vocab: int = 32768) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).float().square().mean()


def resident() -> int:
    """Return the resident bytes of this process, after freed memory has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def train(stage: int, layers: int, width: int, nvme: str | None) -> tuple[object, int]:
    """Train an engine for two steps, and return it with the growth of the process."""
    import zeroengine

    zero: dict[str, object] = {"stage": stage}
    if nvme is not None:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": nvme}
        if stage == 3:
            zero["offload_param"] = {"device": "nvme", "nvme_path": nvme}
    before = resident()
    torch.manual_seed(0)
    engine = zeroengine.initialize(
        Model(layers, width),
        config={
            "zero_optimization": zero,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
    )
    for _ in range(2):
        engine.backward(engine(torch.arange(8)[None]))
        engine.step()
    return engine, resident() - before


def measure(stage: int, ranks: int, layers: int, width: int, nvme: str | None) -> dict[str, float]:
    """The row of one stage, in bytes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    train(stage, 1, 64, nvme)  # loads everything that a first step loads
    engine, growth = train(stage, layers, width, nvme)
    memory = engine.memory()  # type: ignore[attr-defined]
    numel = sum(p.numel() for p in engine.module.parameters())  # type: ignore[attr-defined]
    optimizer, gradients, parameters = ((ranks if stage >= s else 1) for s in (1, 2, 3))
    formula = numel * (2 / parameters + 2 / gradients + 12 / optimizer)
    return dict(numel=numel, formula=formula, states=memory.states, total=memory.total, growth=growth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--stage", type=int, help="this stage only, as JSON")
    parser.add_argument("--nvme", metavar="PATH", help="optimizer and parameters live on this disk")
    args = parser.parse_args()
    if args.stage is not None:
        print(json.dumps(measure(args.stage, args.ranks, args.layers, args.width, args.nvme)))
        return
    print(f"torch {torch.__version__}, bf16 mixed precision with Adam, {args.ranks} ranks; MiB on one rank")
    print("stage   formula   states  states/formula   total with buckets   process grew   grew/total")
    for stage in range(4) if args.nvme is None else (2, 3):
        command = [sys.executable, __file__, "--stage", str(stage)]
        command += ["--ranks", str(args.ranks), "--layers", str(args.layers), "--width", str(args.width)]
        command += ["--nvme", args.nvme] if args.nvme is not None else []
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        mib = {key: value / 2**20 for key, value in row.items()}
        print(
            f"{stage:>5} {mib['formula']:>9.1f} {mib['states']:>8.1f} {row['states'] / row['formula']:>15.3f} "
            f"{mib['total']:>20.1f} {mib['growth']:>14.1f} {row['growth'] / row['total']:>12.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
