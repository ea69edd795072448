"""Measures training on long sequences, of which each rank has a part, beside DeepSpeed's ALST.

    pip install .[bench] transformers
    python benchmarks/long_sequences.py [--size s] [--tokens 16384] [--ranks 2] [--rounds 3] [--tiles]
    python benchmarks/long_sequences.py --exchange

Each peer trains the same Llama of transformers (two layers, random weights, kernel sdpa) in fp32 with AdamW on the
same sequences. The peers take turns for --rounds rounds, in processes of their own, and medians count:

- zeroengine: "sequence_parallel_size" and `zeroengine.shard_sequence`; with --tiles also "tiling"
- DeepSpeed: `UlyssesSPAttentionHF`, `UlyssesSPDataLoaderAdapter`, and the mean over ranks of its tests; with --tiles
  also `TiledMLP`, and the loss by `TiledFusedLogitsLoss` (fused) or `sequence_tiled_compute` (recomputed)
- FSDP2 with torch's `context_parallel`: it has no strategy for attention on a CPU, and the table says so

A step takes a batch from the loader, and runs forward, backward and update. Resident memory is the peak of the steps
above that before the model was built. Tensor bytes are the most that torch's CPU allocator hands out during one more
step, by torch's profiler, above those before it; memory that ranks share is not among them.

--exchange measures the all-to-all of attention alone, as a multiple of the time of copying the bytes.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from machine import describe_machine
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from workload import ADAMW

PEERS = ["zeroengine", "deepspeed", "fsdp2-context-parallel"]
SHAPE = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"]
SIZES = {
    "s": (512, 1408, 8, 4, 8192),
    "s-128k": (512, 1408, 8, 4, 131072),
    "m": (768, 2048, 12, 4, 32768),
}
TILING = {"tiling": {"loss": True, "mlp": True}}
WARM_UP = 2
Step = Callable[[], torch.Tensor]


def build(args: argparse.Namespace) -> Any:
    """Return the model."""
    torch.manual_seed(0)
    shape = dict(zip(SHAPE, SIZES[args.size], strict=True))
    kernel = {"use_cache": False, "attn_implementation": "sdpa"}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, max_position_embeddings=args.tokens, **shape, **kernel))


def batches(args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Yield whole sequences, the same ones on every rank."""
    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(SIZES[args.size][-1], (1, args.tokens), generator=generator)
        yield {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(args.tokens)[None]}


def json_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration that both engines take."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": dist.get_world_size(),
        "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }


def zeroengine_step(model: Any, args: argparse.Namespace, case: str) -> Step:
    """Return a function that takes a step with zeroengine, and returns the loss."""
    import zeroengine

    engine = zeroengine.initialize(model, config=json_config(args) | (TILING if case else {}))
    data = batches(args)

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine(**zeroengine.shard_sequence(next(data), engine=engine)).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def deepspeed_step(model: Any, args: argparse.Namespace, case: str) -> Step:
    """Return a function that takes a step with DeepSpeed's ALST classes, and returns the loss."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import ulysses_sp as alst

    deepspeed.init_distributed("gloo")
    ranks = dist.get_world_size()
    mpu = alst.UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=ranks, micro_batch_size=1
    )
    if case:
        tile_mlps(alst)
    config = json_config(args) | {"steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)
    group, own = mpu.get_sequence_parallel_group(), engine.module
    # Its adapter trains on a sequence of each rank in turn, and so every rank loads others.
    own_sequences = itertools.islice(batches(args), dist.get_rank(), None, ranks)
    data = alst.UlyssesSPDataLoaderAdapter(own_sequences, dist.get_rank(), group, ranks, torch.device("cpu"))

    def step() -> torch.Tensor:
        batch = next(data)
        labels = batch.pop("shift_labels")
        if case:
            part = tiled_loss_of_deepspeed(alst, own, own.model(**batch).last_hidden_state, labels, case, args)
        else:
            logits, vocab = engine(**batch).logits, own.config.vocab_size
            part = own.loss_function(logits=logits, labels=None, vocab_size=vocab, shift_labels=labels)
        # As in tests/unit/ulysses_alst/test_ulysses_sp_hf.py of DeepSpeed.
        losses = torch.distributed.nn.functional.all_gather(part, group=group)
        counts = torch.distributed.nn.functional.all_gather((labels != -100).sum(), group=group)
        loss = sum(mean * count for mean, count in zip(losses, counts, strict=True)) / sum(counts)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def tile_mlps(alst: Any) -> None:
    """Run the MLPs of Llama in tiles, as the docstring of DeepSpeed's `TiledMLP` does."""
    plain = LlamaMLP.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        tiles = torch.tensor(math.ceil(x.shape[1] / x.shape[2]))
        dist.all_reduce(tiles, op=dist.ReduceOp.MAX)
        weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        return alst.TiledMLP.apply(plain, self, x, int(tiles), weights)

    LlamaMLP.forward = forward


def tiled_loss_of_deepspeed(
    alst: Any, model: Any, hidden: torch.Tensor, labels: torch.Tensor, case: str, args: argparse.Namespace
) -> torch.Tensor:
    """Return the mean over the own labels."""
    head = model.lm_head.weight
    tiles = math.ceil(labels.numel() * model.config.vocab_size * 4 / (args.tile_mib * 2**20))

    def sum_of(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.lm_head(x).flatten(0, -2).float(), y.flatten(), reduction="sum")

    if case == "fused":
        total = alst.TiledFusedLogitsLoss.apply(sum_of, model, hidden, labels, None, tiles, [head], "sum")
    else:
        parts, length = {"x": hidden, "y": labels}, labels.shape[1]
        total = alst.sequence_tiled_compute(sum_of, length, tiles, parts, {"self": model}, "x", [head], 0, "sum")
    return total / (labels != -100).sum()


def resident_mib(key: str) -> float:
    """Return a figure of this process's memory, such as `VmHWM`, in MiB."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith(key))


def peak_tensor_bytes(step: Step) -> int:
    """Return the most bytes that torch's CPU allocator has handed out during a step, above those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train with one peer, and return the figures of all ranks."""
    peer, _, case = args.worker.partition(":")
    make = {"zeroengine": zeroengine_step, "deepspeed": deepspeed_step}[peer]
    importlib.import_module(peer)  # before the base line, as transformers is
    base = resident_mib("VmRSS")
    step = make(build(args), args, case)
    Path("/proc/self/clear_refs").write_text("5")
    times, losses = [], []
    for _ in range(WARM_UP + args.steps):
        dist.barrier()
        start = time.perf_counter()
        losses.append(step().item())
        times.append(time.perf_counter() - start)
    own = (resident_mib("VmHWM") - base, peak_tensor_bytes(step) / 2**20)
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, own)
    rss, tensors = (max(values) for values in zip(*peaks, strict=True))
    return {"seconds": statistics.median(times[WARM_UP:]), "rss": rss, "tensors": tensors, "losses": losses}


def calls_of_zeroengine(parts: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return what sends ``parts[rank]`` to each rank: the all-to-all alone, and with the layout of heads around it."""
    from torch import nn

    import zeroengine
    from zeroengine.comm.interfaces import Slices

    ranks, tokens, heads, head_size = parts.shape
    config = {"sequence_parallel_size": ranks, "optimizer": {"type": "Adam"}}
    group = zeroengine.initialize(nn.Linear(8, 8), config=config).sequence_group
    transport = group._transport
    sent, received = transport.empty(parts.numel(), parts.dtype), torch.empty(parts.numel())
    query = torch.randn(1, tokens, ranks * heads, head_size).transpose(1, 2)

    def all_to_all() -> None:
        transport.exchange.all_to_all(received, sent, "benchmark", Slices(group.ranks)).wait_stream()

    return {
        "zeroengine, all-to-all": all_to_all,
        "zeroengine, heads to tokens": lambda: group.scatter_heads([query], "benchmark"),
    }


def exchange(args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a copy and of each all-to-all, for the queries of one layer."""
    ranks, (width, _, heads, *_) = dist.get_world_size(), SIZES[args.size]
    parts = torch.randn(ranks, args.tokens // ranks, heads // ranks, width // heads)
    target = torch.empty_like(parts)
    calls: dict[str, Callable[[], object]] = {
        "copy of the bytes": lambda: target.copy_(parts),
        "gloo, which DeepSpeed takes": lambda: dist.all_to_all_single(target, parts),
        **calls_of_zeroengine(parts),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(10 * args.steps):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            slowest = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if number >= args.steps:
                seconds[name].append(float(slowest))
    return {"mib": parts.nbytes / 2**20, "seconds": {name: statistics.median(s) for name, s in seconds.items()}}


def launch(run: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one run in processes of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
    command += [__file__, "--worker", run]
    for key in ("size", "tokens", "stage", "steps", "tile_mib"):
        command += [f"--{key.replace('_', '-')}", str(getattr(args, key))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_SKIP_CUDA_CHECK": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{run} failed:\n{done.stderr[-4000:]}")
    return lines[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--size", choices=SIZES, default="s", help="s-128k has a vocabulary of 131,072")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a sequence, over all ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps of a run that count")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--tiles", action="store_true", help="also run MLPs and the loss in tiles")
    parser.add_argument("--tile-mib", type=int, default=1024, help="logits in a tile of DeepSpeed's loss")
    parser.add_argument("--exchange", action="store_true", help="measure the all-to-all alone")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        result = exchange(args) if args.worker == "exchange" else train(args)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
        dist.barrier()
        return dist.destroy_process_group()
    title = f"{describe_machine()}, transformers {version('transformers')}; {args.ranks} ranks, {args.tokens} tokens"
    if args.exchange:
        rounds = [launch("exchange", args) for _ in range(args.rounds)]
        medians = {name: statistics.median(r["seconds"][name] for r in rounds) for name in rounds[0]["seconds"]}
        copy = medians["copy of the bytes"]
        print(f"{title}, size {args.size}, {rounds[0]['mib']:.1f} MiB a rank, {args.rounds} rounds")
        for name, seconds in medians.items():
            print(f"{name:<28} {seconds * 1e3:>8.2f} ms {seconds / copy:>6.2f} of the copy")
        return
    cases = {"zeroengine": [":tiles"], "deepspeed": [":fused", ":recomputed"]} if args.tiles else {}
    runs = [f"{peer}{case}" for peer in args.peer if peer in PEERS[:2] for case in cases.get(peer, [""])]
    results: dict[str, list[dict[str, Any]]] = {run: [] for run in runs}
    for _ in range(args.rounds):
        for run in runs:
            results[run].append(launch(run, args))
    print(f"{title}, size {args.size}, stage {args.stage}, fp32, {args.rounds} rounds{', tiles' if args.tiles else ''}")
    header = f"{'ms a step':>9} {'min':>7} {'max':>7} {'tokens/s':>9} {'peak RSS MiB':>13} {'tensors MiB':>12}"
    print(f"{'':<24} {header} {'first loss':>11} {'last':>8}")
    for run, rounds in results.items():
        ms = [result["seconds"] * 1e3 for result in rounds]
        rss, tensors = (statistics.median(r[key] for r in rounds) for key in ("rss", "tensors"))
        median, losses = statistics.median(ms), rounds[-1]["losses"]
        speed = f"{median:>9.0f} {min(ms):>7.0f} {max(ms):>7.0f} {args.tokens / median * 1e3:>9.0f}"
        print(
            f"{run.replace(':', ', '):<24} {speed} {rss:>13.0f} {tensors:>12.0f} {losses[0]:>11.5f} {losses[-1]:>8.4f}"
        )
    if PEERS[2] in args.peer:
        print(f"{PEERS[2]:<24} does not run: its strategies lack torch's attention on a CPU")


if __name__ == "__main__":
    main()
