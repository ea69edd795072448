"""Trains a language model on the bytes of real text: the Python standard library's own source files.

    zero-launch --nproc 2 --config configs/zero2.json examples/train_lm.py

Another configuration, another stage: the script stays as it is. `--text FILE` trains on a text of your own.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import zeroengine

VOCABULARY = 256  # a token is a byte
TEXT_LIMIT = 8 << 20  # bytes of the standard library that are read
HELD_OUT = 20  # every 20th file is held out


class Block(nn.Module):
    """A transformer block: attention and a feed-forward layer, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, time, width)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, width / heads)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer over bytes. With targets, returns the mean loss in nats per byte."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, generator: torch.Generator) -> bytes:
        """Continue the prompt by `count` sampled bytes."""
        ids = torch.tensor([list(prompt)], device=self.head.weight.device)
        for _ in range(count):
            logits = self(ids[:, -self.context :])[0, -1]
            choice = torch.multinomial((logits / 0.8).softmax(0).cpu(), 1, generator=generator)
            ids = torch.cat([ids, choice.view(1, 1).to(ids)], dim=1)
        return bytes(ids[0].tolist())


def read_text(path: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The train and the held-out part: of the standard library, other files; of one text, its last twentieth."""
    if path is not None:
        text = path.read_bytes()
        cut = len(text) - len(text) // HELD_OUT
        parts = [text[:cut], text[cut:]]
    else:
        library = Path(sysconfig.get_path("stdlib"))
        files = sorted(file.relative_to(library) for file in library.rglob("*.py"))
        files = [file for file in files if not {"site-packages", "dist-packages", "test", "tests"} & set(file.parts)]
        parts, size = [b"", b""], 0
        for index, file in enumerate(files):
            source = (library / file).read_bytes()
            size += len(source)
            if size > TEXT_LIMIT:
                break
            parts[index % HELD_OUT == HELD_OUT - 1] += source
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out


def sample(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, (batch, context): the bytes from each start, and those one further."""
    window = text[starts[:, None] + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]


def batches(text: torch.Tensor, batch: int, context: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless random samples; another seed on each rank gives each its own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield sample(text, torch.randint(len(text) - context, (batch,), generator=generator), context)


@torch.no_grad()
def evaluate(engine: zeroengine.Engine, text: torch.Tensor, count: int) -> float:
    """The held-out loss in nats per byte over `count` batches a rank, evenly spaced and the same in every run."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch, context = engine.config.train_micro_batch_size_per_gpu, engine.module.context
    starts = torch.linspace(0, len(text) - context - 1, count * batch * world_size).long()
    total = torch.zeros(1, dtype=torch.float64)
    engine.eval()
    for chunk in starts.view(world_size, count, batch)[rank]:
        ids, targets = sample(text, chunk, context)
        total += engine(ids.to(engine.device), targets.to(engine.device)).double().cpu()
    engine.train()
    total = total.to(engine.device)
    dist.all_reduce(total)
    return total.item() / (count * world_size)
