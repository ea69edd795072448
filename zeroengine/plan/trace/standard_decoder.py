"""A decoder-only transformer of a given size: the model of plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from zeroengine.sequence.sequence_parallel import attention


class StandardDecoderBlock(nn.Module):
    """Attention with rotary positions left out, and a gated feed-forward of SwiGLU, both after an RMS norm.

    This is the block of Llama (arXiv 2302.13971). Rotary positions have no parameters and little arithmetic.
    """

    def __init__(self, width: int, heads: int, hidden: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of the shape of ``x``: batch, sequence, width."""
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            projection(normed).view(batch, length, -1, self.head_width).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        if self.kv_heads != self.heads:
            # As libraries do where the kernel takes equal numbers of heads alone.
            key, value = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (key, value))
        mixed = attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = self.feed_forward_norm(x)
        change: torch.Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + change


class StandardDecoder(nn.Module):
    """Embedding, blocks, norm and a head of its own. ``forward`` returns the mean cross-entropy of the next tokens.

    Attributes:
        kv_heads: Heads of keys and values.
        PLAN: How it is split over ranks. See ``zeroengine.parallelize``.
    """

    PLAN: ClassVar[Mapping[str, str]] = {
        "embedding": "rowwise_whole_input",
        **{f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "gate", "up")},
        **{f"blocks.*.{name}": "rowwise" for name in ("output", "down")},
        "head": "colwise_gathered",
    }

    def __init__(self, vocab: int, layers: int, width: int, heads: int, hidden: int, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(StandardDecoderBlock(width, heads, hidden, kv_heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``ids`` and ``labels``, both of the shape batch, sequence."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())
