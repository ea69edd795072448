"""The model of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.distributed.random_models.blocks import Block, Positions, unpack
from tests.distributed.random_models.calls import BLOCK_CALLS, DIRECT_CALLS
from tests.distributed.random_models.functions import ChunkedCrossEntropy, FaultInBackward, FusedCrossEntropy
from tests.distributed.random_models.recipe import LENGTH, VOCAB, Op, Recipe


class RandomModel(nn.Module):
    """The model of a recipe: token ids and labels, both of shape (batch, LENGTH), to a loss."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        self.recipe, width = recipe, recipe.width
        self.fault: BaseException | None = None
        self.early: torch.Tensor | None = None
        self.tok = nn.Embedding(VOCAB, width)
        if recipe.positions:
            self.positions = Positions(width, recipe.positions == "whole")
        self.blocks = nn.ModuleList(Block(spec, width) for spec in recipe.blocks)
        directs = 1 + max((op.block for op in recipe.ops if op.kind == "direct"), default=-1)
        if directs:
            self.directs = nn.ParameterList(torch.randn(width, width) / width for _ in range(directs))
        if any(op.kind == "gain" for op in recipe.ops):
            self.gain = nn.Parameter(torch.ones(()))
        if recipe.query == "parameter":
            self.query = nn.Parameter(torch.randn(width) / 4)
        elif recipe.query == "leaf":
            self.query = torch.full((width,), 0.1, dtype=getattr(torch, recipe.dtype), requires_grad=True)
        if recipe.unused:
            self.unused = nn.Parameter(torch.randn(3))
        self.norm = nn.LayerNorm(width)
        if recipe.head not in HAND_TIED:
            self.head = nn.Linear(width, VOCAB, bias=False)
        if recipe.head == "tied":
            self.head.weight = self.tok.weight
        for index in recipe.tied[1:]:
            body, first = self.blocks[index].body, self.blocks[recipe.tied[0]].body
            body.up.weight = first.up.weight
        for name in recipe.frozen:
            getattr(self, name).requires_grad_(False)
        self.to(getattr(torch, recipe.dtype))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, step: int = 0) -> Any:
        self.early = EARLY[self.recipe.head](self) if self.recipe.head in EARLY else None
        x, extras, skips = self.tok(ids), [], []
        if self.recipe.positions:
            x = x + self.positions(LENGTH)
        for index, op in enumerate(self.recipe.ops):
            if step in op.skip:
                continue
            extra = None
            if op.kind == "block":
                x, extra = self._call_block(op, x)
            elif op.kind == "direct":
                x = x + DIRECT_CALLS[op.how](x, self.directs[op.block])
            elif op.kind == "gain":
                x = x * self.gain + self.gain
            elif op.kind == "in place":
                x.mul_(0.5).add_(0.1)
            elif op.kind == "push":
                skips.append(x)
            elif skips:
                x = x + skips.pop()
            if extra is not None and self.recipe.extras == "stream":
                x = x + 0.1 * extra.mean()
            elif extra is not None:
                extras.append(extra)
            if self.recipe.fault == "backward" and self.recipe.fault_at == index:
                x = FaultInBackward.apply(x, self)
        hidden = self.norm(x)
        loss = HEADS[self.recipe.head](self, hidden.flatten(0, 1), labels.flatten())
        if self.recipe.extras == "loss":
            loss = loss + sum(0.1 * extra.square().mean() for extra in extras)
        if self.recipe.output == "dict":
            return {"loss": loss, "hidden": hidden, "extras": extras}
        return (loss, hidden) if self.recipe.output == "tuple" else loss

    def _call_block(self, op: Op, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        block = self.blocks[op.block]
        how, _, target = op.how.partition(" of ")

        def function(x: torch.Tensor) -> Any:
            more = (self.query,) if self.recipe.query else ()
            if target == "keyword":
                return unpack(block(x=x, query=more[0] if more else None))
            if target == "method":
                return block.encode(x, *more)
            if target == "body":
                return x * 0.5 + block.body(x), None
            if target == "functional call":
                scaled = {name: param * 0.9 for name, param in block.named_parameters()}
                return unpack(functional_call(block, scaled, (x, *more)))
            return unpack(block(x, *more))

        hidden, extra = BLOCK_CALLS[how](function, x)
        if block.spec.output == "attribute" and target not in ("method", "body"):
            extra, block.extra = block.extra, None
        return hidden, extra


def _by_early(model: RandomModel, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert model.early is not None
    logits, model.early = hidden @ model.early, None
    return F.cross_entropy(logits, labels.clamp(max=logits.shape[-1] - 1))


HEADS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda model, hidden, labels: F.cross_entropy(model.head(hidden), labels),
    "tied": lambda model, hidden, labels: F.cross_entropy(model.head(hidden), labels),
    "hand tied": lambda model, hidden, labels: F.cross_entropy(F.linear(hidden, model.tok.weight), labels),
    "hand tied, transposed": lambda model, hidden, labels: F.cross_entropy(hidden @ model.tok.weight.t(), labels),
    "hand tied, fused": lambda model, hidden, labels: FusedCrossEntropy.apply(hidden, model.tok.weight, labels),
    "fused": lambda model, hidden, labels: FusedCrossEntropy.apply(hidden, model.head.weight, labels),
    "chunked": lambda model, hidden, labels: ChunkedCrossEntropy.apply(hidden, model.head.weight, labels),
    "linear of the weight": lambda model, hidden, labels: F.cross_entropy(F.linear(hidden, model.head.weight), labels),
}
# What the forward takes of a weight before everything else, and uses in the head.
EARLY: dict[str, Callable[[RandomModel], torch.Tensor]] = {
    "early view": lambda model: model.tok.weight.t(),
    "early detached": lambda model: model.tok.weight.detach().t(),
    "early rows": lambda model: model.tok.weight[1:].t(),
}
HEADS |= {name: _by_early for name in EARLY}
HAND_TIED = {"hand tied", "hand tied, transposed", "hand tied, fused", *EARLY}
