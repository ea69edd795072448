"""Reinforcement learning with a sampler in a process of its own, and without another library.

    zero-launch --nproc 2 examples/reinforce.py --stage 3

The ranks train a small policy by REINFORCE. A sampler process holds a whole copy of it. Before each step it receives
the weights that have changed, writes sequences of digits, and sends them back. A sequence earns the share of its digits
that are one larger than the digit before. What a sampling engine such as vLLM would do is in `sample`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zeroengine

DIGITS, LENGTH, WIDTH = 10, 12, 64


class Policy(nn.Module):
    """Says which digit comes next, from the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(2 * WIDTH, DIGITS)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        """Return the logits (batch, length, digits) of the digit after each of `digits` (batch, length)."""
        x = self.embedding(digits)
        x = torch.cat([x, F.pad(x, (0, 0, 1, 0))[:, :-1]], 2)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def reward(digits: torch.Tensor) -> torch.Tensor:
    return ((digits[:, 1:] - digits[:, :-1]) % DIGITS == 1).float().mean(1)


@torch.no_grad()
def sample(policy: nn.Module, count: int) -> torch.Tensor:
    digits = torch.randint(DIGITS, (count, 1))
    for _ in range(LENGTH):
        digits = torch.cat([digits, policy(digits)[:, -1].softmax(1).multinomial(1)], 1)
    return digits


def run_sampler(port: int, rounds: int, count: int) -> None:
    """Receive weights and send samples, as often as the trainer takes steps."""
    store = dist.TCPStore("localhost", port)
    policy = Policy()
    for number in range(rounds):
        zeroengine.receive_weights(store, into=policy)
        store.set(f"samples {number}", json.dumps(sample(policy, count).tolist()))


def wait_for_samples(store: dist.Store, sampler: subprocess.Popen[bytes], number: int) -> list[list[int]]:
    while not store.check([key := f"samples {number}"]):
        if sampler.poll() is not None:
            raise RuntimeError(f"the sampler has ended with exit code {sampler.returncode}")
        time.sleep(1e-3)
    samples: list[list[int]] = json.loads(store.get(key))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--samples", type=int, default=128, help="sequences a step, divided among the ranks")
    parser.add_argument("--sampler", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.sampler is not None:
        return run_sampler(args.sampler, args.steps, args.samples)
    config = {
        "train_micro_batch_size_per_gpu": args.samples,
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.0}},
    }
    engine = zeroengine.initialize(Policy(), config=config)
    store = sampler = None
    if engine.rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        command = [sys.executable, __file__, "--sampler", store.port, "--steps", args.steps, "--samples", args.samples]
        # The sampler is no rank of the training.
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        sampler = subprocess.Popen(list(map(str, command)), env=environment)
    token = zeroengine.WeightsToken()
    for step in range(args.steps):
        token = engine.send_weights(store, since=token, start_timeout=20)
        samples: list[list[int]] = []
        # An error of rank 0 becomes an error of all ranks, and its samples come to all.
        with engine.group.collective_errors("to receive samples", samples) as samples_of_ranks:
            if store is not None and sampler is not None:
                samples += wait_for_samples(store, sampler, step)
        digits = torch.tensor(samples_of_ranks[0])[engine.rank :: engine.world_size]
        rewards = reward(digits)
        log_probs = engine(digits[:, :-1]).log_softmax(2).gather(2, digits[:, 1:, None]).sum((1, 2))
        engine.backward(-((rewards - rewards.mean()) * log_probs).mean())
        engine.step()
        if engine.rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:3}: reward {rewards.mean():.3f}, such as {''.join(map(str, digits[0].tolist()))}")
    if sampler is not None:
        sampler.wait(60)
    engine.close()


if __name__ == "__main__":
    main()
