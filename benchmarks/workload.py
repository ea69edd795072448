"""One rank of one training run under one engine, for peers.py. Rank 0 prints one line of JSON.

Every engine trains the same decoder-only transformer with the same batches and AdamW, through its own ordinary API.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

SIZES = {  # layers, width, heads, vocabulary
    "xs": (4, 128, 4, 512),
    "s": (8, 512, 8, 8192),
    "m": (12, 768, 12, 32768),
    "b": (20, 2048, 16, 8192),  # a billion parameters
    "3b": (26, 3072, 24, 8192),
}
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
CLIP = 1.0
HALF = {"bf16": torch.bfloat16}
Step = Callable[[], torch.Tensor]
MARKS: list[dict[str, float]] = []  # of each step, where the engine tells


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocab: int, context: int, tied: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def batches(size: str, rank: int, batch: int, context: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    vocab = SIZES[size][3]
    while True:
        start = torch.randint(0, vocab, (batch, 1), generator=generator)
        sequence = (start + torch.arange(context + 1)) % vocab
        yield sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


def resident_mib() -> float:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def json_config(args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }
    if args.optimizer == "Muon":
        config["optimizer"] = {"type": "Muon", "params": {**ADAMW, "momentum": 0.95}}
        if args.engine == "deepspeed":
            # Its Muon refuses reduce-scatters, and its rule for names takes "tokens" and "positions" for matrices.
            config["zero_optimization"]["reduce_scatter"] = False
    if args.offload != "none":
        place = {"device": args.offload, "nvme_path": args.nvme_path, "pin_memory": False}
        config["zero_optimization"]["offload_optimizer"] = place
        if args.stage == 3:
            config["zero_optimization"]["offload_param"] = place
    return config | ({"bf16": {"enabled": True}} if args.dtype == "bf16" else {})


def zeroengine_step(model: nn.Module, args: argparse.Namespace, data: Iterator[Any]) -> Step:
    import zeroengine

    engine = zeroengine.initialize(model, config=json_config(args))
    seen = {"read": 0, "written": 0}

    def step() -> torch.Tensor:
        loss = engine(*next(data))
        engine.backward(loss)
        before, start = traffic(engine), time.perf_counter()
        engine.step()
        MARKS.append(
            {
                "update_s": time.perf_counter() - start,
                "update_read": traffic(engine)[0] - before[0],
                "update_written": traffic(engine)[1] - before[1],
                "step_read": traffic(engine)[0] - seen["read"],
                "step_written": traffic(engine)[1] - seen["written"],
                "accounted_mib": engine.memory().total / 2**20,
                "nvme_mib": sum(engine.memory().nvme.values()) / 2**20,
            }
        )
        seen["read"], seen["written"] = traffic(engine)
        return loss

    return step


def traffic(engine: Any) -> tuple[int, int]:
    """Return the bytes that an engine of zeroengine has read from and written to disks."""
    pairs = [disk.traffic for disk in engine._parts.partition.placement.disks]
    return sum(read for read, _ in pairs), sum(written for _, written in pairs)


def deepspeed_step(model: nn.Module, args: argparse.Namespace, data: Iterator[Any]) -> Step:
    import deepspeed

    config = json_config(args) | {"steps_per_print": 10**9}
    if args.offload == "nvme":
        config["aio"] = {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True}
        numel = sum(p.numel() for p in model.parameters())
        for key in ("offload_optimizer", "offload_param"):
            if key in config["zero_optimization"]:
                config["zero_optimization"][key] = {**config["zero_optimization"][key], "buffer_count": 5}
        config["zero_optimization"].setdefault("sub_group_size", max(numel // 8, 1 << 24))
    if args.optimizer == "Muon":
        model.embed_tokens, model.embed_positions = model.tokens, model.positions
        del model.tokens, model.positions
        type(model).tokens, type(model).positions = (  # type: ignore[attr-defined]
            property(lambda self: self.embed_tokens),
            property(lambda self: self.embed_positions),
        )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> torch.Tensor:
        loss = engine(*next(data))
        engine.backward(loss)
        engine.step()
        return loss

    return step


def torch_step(model: nn.Module, args: argparse.Namespace, data: Iterator[Any]) -> Step:
    """Train with DDP, FSDP2, or as the floor: the same local work without communication."""
    half = HALF.get(args.dtype)
    if args.engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif args.engine == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # torch 2.15's default, which is written out because earlier versions reduce in param_dtype.
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
        options: dict[str, Any] = dict(
            mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
            mp_policy=policy,
            reshard_after_forward=args.stage == 3,
        )
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, **options)  # type: ignore[arg-type]
        fully_shard(model, **options)
    step = plain_step(model, None if args.engine == "fsdp2" else half, args.optimizer)
    return lambda: step(*next(data))


def plain_step(
    model: nn.Module, half: torch.dtype | None, kind: str = "AdamW"
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Take a step of plain PyTorch: autocast to ``half`` if there is one, clipping, and fused AdamW or torch's Muon."""
    matrices = {p for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2} if kind == "Muon" else {}
    rest = [param for param in model.parameters() if param not in matrices]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, fused=True, **ADAMW)]
    if kind == "Muon":
        optimizers.append(torch.optim.Muon(matrices, lr=ADAMW["lr"], weight_decay=ADAMW["weight_decay"]))

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ids.device.type, half, enabled=half is not None):
            loss = model(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["floor", "ddp", "fsdp2", "deepspeed", "zeroengine"])
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--size", choices=SIZES, default="s")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--offload", choices=["none", "cpu", "nvme"], default="none")
    parser.add_argument("--nvme-path")
    parser.add_argument("--optimizer", choices=["AdamW", "Muon"], default="AdamW")
    parser.add_argument("--meta", action="store_true", help="build the model without memory for its parameters")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    make = {"zeroengine": zeroengine_step, "deepspeed": deepspeed_step}.get(args.engine, torch_step)
    if args.engine in ("zeroengine", "deepspeed"):
        importlib.import_module(args.engine)  # before the base line, as torch is
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    base = resident_mib()
    construction = importlib.import_module("zeroengine").meta_init if args.meta else contextlib.nullcontext
    with construction():
        model = Transformer(*SIZES[args.size], args.context)
    step = make(model, args, batches(args.size, rank, args.batch, args.context))
    del model
    times, losses = [], []
    for _ in range(args.warmup + args.steps):
        start = time.perf_counter()
        losses.append(step().item())
        times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - base
    tokens = world * args.batch * args.context / statistics.median(times[args.warmup :])
    if rank == 0:
        found = {"tokens_per_s": tokens, "step_s": statistics.median(times[args.warmup :]), "peak_mib": peak}
        found |= {"now_mib": resident_mib() - base, "loss": losses[-1], "losses": losses}
        if MARKS:
            found |= {key: statistics.median(mark[key] for mark in MARKS[args.warmup :]) for key in MARKS[0]}
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
