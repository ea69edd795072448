"""Measures what saving a LoRA adapter costs at stage 3, beside the bytes of the adapter and of its base.

    python benchmarks/adapters.py                       a Llama of 20 M parameters
    python benchmarks/adapters.py --size 1b --rank 16   1.2 B parameters, with random values: 1.2 GiB a rank in bf16

A Llama of transformers with random values is built by ``meta_init``, its linear layers get low-rank adapters, and two
ranks train it in bf16 for a step. Of each call the table has the bytes that its files hold, and the bytes of parameters
that were all-gathered meanwhile. The adapter's bytes are its fp32 masters, both moments and step counts.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
# Of each size: width, inner width, blocks, heads, heads of keys and values, and words. The largest is Llama 3.2 1B.
SIZES = {"s": (384, 1024, 6, 6, 2, 16384), "1b": (2048, 8192, 16, 32, 8, 128256)}


class AdaptedLinear(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it (arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def build(size: str, rank: int, targets: list[str]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, blocks, heads, key_value_heads, words = SIZES[size]
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=blocks,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            tie_word_embeddings=True,
        )
    )
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        parent, _, child = name.rpartition(".")
        if child in targets:
            setattr(model.get_submodule(parent), child, AdaptedLinear(layer, rank))
    return model


def count_gathered(engine: Any) -> list[int]:
    """Return a list that grows by the bytes of each all-gather of parameters."""
    gather, nbytes = engine._parts.ranks.transport.gather, list[int]()
    original = gather.all_gather

    def all_gather(full: torch.Tensor, shard: torch.Tensor, label: str, *ranks: Any) -> Any:
        nbytes.append(full.nbytes)
        return original(full, shard, label, *ranks)

    gather.all_gather = all_gather
    return nbytes


def measure(options: argparse.Namespace) -> None:
    """Run one rank."""
    import zeroengine

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with zeroengine.meta_init():
        model = build(options.size, options.rank, options.targets)
    engine = zeroengine.initialize(
        model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "comm": {"timeout_seconds": 600},
        },
    )
    units = engine.units
    adapter, base = ([p for unit in units if unit.trainable is kind for p in unit.params] for kind in (True, False))
    ids = torch.randint(0, 1000, (1, 8))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    nbytes = count_gathered(engine)
    numel, base_numel = (sum(param.numel() for param in params) for params in (adapter, base))
    state_bytes = 12 * numel + 4 * len(adapter)
    rows: list[tuple[str, int, int, int, float]] = []

    def run(name: str, expected: int, call: Callable[[Path], object]) -> None:
        folder = options.dir / str(len(rows))
        nbytes.clear()
        dist.barrier()
        start = time.perf_counter()
        call(folder)
        seconds = time.perf_counter() - start
        dist.barrier()
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        rows.append((name, size, expected, sum(nbytes), seconds))
        dist.barrier()
        if engine.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)

    run("save_checkpoint(frozen=False)", state_bytes, lambda path: engine.save_checkpoint(path, frozen=False))
    run("save_weights(trainable_only=True)", 4 * numel, lambda path: engine.save_weights(path, trainable_only=True))
    run("full_state_dict(trainable_only=True)", 0, lambda path: engine.full_state_dict(trainable_only=True))
    if options.whole:
        run("save_checkpoint()", state_bytes + 2 * base_numel, engine.save_checkpoint)
        run("full_state_dict(rank0_only=True)", 0, lambda path: engine.full_state_dict(rank0_only=True))
    if engine.rank == 0:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        print(f"{machine}, torch {torch.__version__}, {engine.world_size} ranks, stage 3, bf16")
        print(
            f"base {base_numel / 1e6:.1f} M parameters, adapter {numel / 1e6:.2f} M in {len(adapter)} tensors "
            f"({state_bytes / MIB:.1f} MiB of states)\n"
        )
        print("| call | files MiB | over the states' bytes | gathered MiB | seconds |\n|---|---|---|---|---|")
        for name, size, expected, gathered_bytes, seconds in rows:
            ratio = f"{size / expected:.3f}" if expected else ""
            print(f"| `{name}` | {size / MIB:.2f} | {ratio} | {gathered_bytes / MIB:.2f} | {seconds:.1f} |")
    engine.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="s")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter's matrices")
    parser.add_argument(
        "--targets",
        nargs="+",
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        help="the linear layers that get adapters",
    )
    parser.add_argument("--whole", action="store_true", help="save the whole model, too")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--dir", type=Path, help="a folder on the disk to write to")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if "RANK" in os.environ:
        measure(options)
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks)]
        # An option that is given twice takes the last value.
        arguments = [*sys.argv[1:], "--dir", folder]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *launch, __file__, *arguments], env=environment, check=True)


if __name__ == "__main__":
    main()
