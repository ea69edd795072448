"""Measures a mixture of experts that is split over ranks, beside one that is partitioned alone, and DeepSpeed's AutoEP.

    pip install .[bench] transformers
    python benchmarks/experts.py [--ranks 4] [--tokens 128] [--rounds 3] [--peer zeroengine zeroengine-split ...]

Each peer trains the same Mixtral of transformers in fp32 with AdamW at stage 3, of whose parameters the experts are
about 80 %. The peers take turns for --rounds rounds, in processes of their own, and medians count:

- zeroengine: every rank gathers all experts of a layer
- zeroengine-split: "expert_parallel", over all ranks, which send tokens to one another
- deepspeed: stage 3; deepspeed-split: its "expert_parallel" (stage 2, the highest that it takes)

Resident memory is the peak of the steps above that before the model was built, the mean over ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from machine import describe_machine
from transformers import MixtralConfig, MixtralForCausalLM
from workload import ADAMW

PEERS = ["zeroengine", "zeroengine-split", "deepspeed", "deepspeed-split"]
WARM_UP, STEPS = 2, 5


def build() -> Any:
    """Return the model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=8192, num_hidden_layers=4, use_cache=False, **sizes, **experts))


def make_step(peer: str, model: Any) -> tuple[Any, Callable[[dict[str, torch.Tensor]], torch.Tensor]]:
    """Return the engine, and a function that takes a step with it."""
    splits, ranks = peer.endswith("-split"), dist.get_world_size()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }
    if splits:
        config["expert_parallel"] = {"enabled": True, "autoep_size": ranks}
    if peer.startswith("deepspeed"):
        import deepspeed

        config["zero_optimization"] = {"stage": 2 if splits else 3}
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config | {"steps_per_print": 10**9}
        )
    else:
        import zeroengine

        engine = zeroengine.initialize(model, config=config)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    return engine, step


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one peer."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    model = build()
    params = {name: param.numel() for name, param in model.named_parameters()}
    share = sum(numel for name, numel in params.items() if "experts" in name) / sum(params.values())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, step = make_step(args.worker, model)
    seconds, losses = [], []
    for number in range(WARM_UP + STEPS):
        ids = torch.randint(8192, (1, args.tokens), generator=generator)
        dist.barrier()
        start = time.perf_counter()
        loss = step({"input_ids": ids, "labels": ids})
        dist.barrier()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    rss = torch.tensor(float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    dist.all_reduce(rss)
    return {
        "seconds": statistics.median(seconds),
        "losses": losses,
        "rss": float(rss) / dist.get_world_size(),
        "share": share,
        "numel": sum(params.values()),
    }


def launch(peer: str, args: argparse.Namespace) -> dict[str, Any] | str:
    """Return the figures of one run in processes of its own, or the last line of its error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
    command += [__file__, "--worker", peer, "--tokens", str(args.tokens)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_SKIP_CUDA_CHECK": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    errors = [line for line in done.stderr.splitlines() if "Error" in line and "ChildFailed" not in line]
    return lines[-1] if lines else (errors or done.stderr.splitlines() or ["no output"])[-1].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a rank in a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        result = train(args)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
        dist.barrier()
        return dist.destroy_process_group()
    results: dict[str, list[dict[str, Any]]] = {peer: [] for peer in args.peer}
    failed: dict[str, str] = {}
    for _ in range(args.rounds):
        for peer in args.peer:
            found = launch(peer, args) if peer not in failed else failed[peer]
            if isinstance(found, str):
                failed[peer] = found
            else:
                results[peer].append(found)
    print(
        f"{describe_machine()}, transformers {version('transformers')}; {args.ranks} ranks, {args.tokens} tokens a rank"
    )
    print(
        f"{'':<20} {'ms a step':>9} {'min':>7} {'max':>7} {'tokens/s':>9} {'RSS MiB':>8} {'first loss':>11} {'last':>8}"
    )
    for peer, rounds in results.items():
        if peer in failed:
            print(f"{peer:<20} does not run: {failed[peer][:150]}")
            continue
        ms = [result["seconds"] * 1e3 for result in rounds]
        median, rss, losses = statistics.median(ms), statistics.median(r["rss"] for r in rounds), rounds[-1]["losses"]
        speed = f"{median:>9.0f} {min(ms):>7.0f} {max(ms):>7.0f} {args.ranks * args.tokens / median * 1e3:>9.0f}"
        print(f"{peer:<20} {speed} {rss:>8.0f} {losses[0]:>11.5f} {losses[-1]:>8.4f}")
    first = next(iter(results.values()))
    if first:
        print(f"{first[0]['numel'] / 1e6:.1f} M parameters, {first[0]['share']:.0%} of them experts")


if __name__ == "__main__":
    main()
