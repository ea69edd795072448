"""Small models for the distributed tests, and their training by plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH = 61, 24  # sizes that no alignment divides


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """Embedding, blocks, norm, head; the head tied to the embedding or not."""

    def __init__(self, tied: bool = True, blocks: int = 3) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def build(factory: Callable[[], nn.Module] = TinyLM, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return factory()


def batch(step: int, rank: int, size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(0, VOCAB, (size, 1), generator=generator, device="cpu").to(torch.get_default_device())
    sequence = (start + torch.arange(9)) % VOCAB
    return sequence[:, :-1], sequence[:, 1:]


def joined(step: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = [batch(step, rank) for rank in range(world_size)]
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def config(stage: int, **more: Any) -> dict[str, Any]:
    """A configuration under which the tiny units really are partitioned."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero_optimization", {})}
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": dict(ADAMW)},
        "comm": {"timeout_seconds": 30, **more.pop("comm", {})},
    }
    return base | {"zero_optimization": zero} | more


def plain_losses(
    world_size: int, steps: int, factory: Callable[[], nn.Module] = TinyLM, clip: float = 1.0
) -> Iterator[float]:
    """One process, the joined batch, torch.optim.AdamW."""
    model = build(factory)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)  # type: ignore[arg-type]
    for step in range(steps):
        loss = model(*joined(step, world_size))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
