"""A small causal language model whose attention is parallel over sequences, and its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.models import VOCAB, WIDTH, build
from tests.distributed.training import Task, Trained, settings
from zeroengine.sequence.batches import IGNORE_INDEX

# Divisible by 2 and by 4, and with fewer key heads than the largest degree has ranks.
HEADS, KEY_HEADS, HEAD_SIZE = 4, 2, 6
NUM_TOKENS = 22  # that neither 4 nor 8 divides
# How an attention layer is called: activation checkpoints, and the like.
Call = Callable[..., torch.Tensor]


def call_directly(module: nn.Module, *args: Any) -> torch.Tensor:
    output: torch.Tensor = module(*args)
    return output


def call_reentrant(module: nn.Module, *args: Any) -> torch.Tensor:
    output: torch.Tensor = checkpoint(module, *args, use_reentrant=True)
    return output


def call_not_reentrant(module: nn.Module, *args: Any) -> torch.Tensor:
    output: torch.Tensor = checkpoint(module, *args, use_reentrant=False)
    return output


class Attention(nn.Module):
    """Grouped queries, and values of another head size."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * HEAD_SIZE)
        self.key, self.value = nn.Linear(WIDTH, KEY_HEADS * HEAD_SIZE), nn.Linear(WIDTH, KEY_HEADS * 4)
        self.out = nn.Linear(HEADS * 4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in ((self.query, HEADS), (self.key, KEY_HEADS), (self.value, KEY_HEADS))
        )
        attended = zeroengine.sequence_parallel.attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class CausalLM(nn.Module):
    """Two blocks, whose loss is the mean over the tokens of all parts."""

    def __init__(self, call: Call = call_directly) -> None:
        super().__init__()
        self.call = call
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def scores(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = self.call(block, x)
        scores: torch.Tensor = self.head(x)
        return scores.float()

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
        scores = self.scores(input_ids, position_ids)
        total = F.cross_entropy(scores.flatten(0, 1), shift_labels.flatten(), reduction="sum")
        return zeroengine.mean_loss(total, (shift_labels != IGNORE_INDEX).sum())


def sample(step: int, group: int, length: int = NUM_TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences, and labels of which each part has another number."""
    generator = torch.Generator().manual_seed(1000 * step + group)
    start = torch.randint(0, VOCAB, (2, 1), generator=generator)
    ids = (start + 3 * torch.arange(length)) % VOCAB
    labels = ids.clone()
    labels[0, : 3 + step % 5] = IGNORE_INDEX
    labels[1, 9:16] = IGNORE_INDEX
    return ids, labels


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)


TASK = Task(CausalLM, sample, adamw, steps=3)


def train(task: Task, stage: int, degree: int, **more: Any) -> Trained:
    """Train on this rank, with the samples of its group."""
    model = build(task.factory)
    engine = zeroengine.initialize(
        model, task.optimizer(model), settings(task, stage, sequence_parallel_size=degree, **more)
    )
    losses, norms = [], []
    for step in range(task.steps * task.micro_steps):
        ids, labels = task.data(step, engine.sample_group)
        loss = engine(**zeroengine.shard_sequence({"input_ids": ids, "labels": labels}, engine=engine))
        engine.backward(loss)
        if engine.step():
            assert engine.grad_norm is not None
            norms.append(engine.grad_norm)
        losses.append(loss.item())
    trained = Trained(losses, norms, engine.full_state_dict())
    engine.close()
    return trained
