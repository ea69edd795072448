"""Random models, and random ways to train them, from a seed.

A `Recipe` says everything about one model and its training. `random_recipe` draws three to six features, which add
blocks, calls of blocks, and habits of training to it. To run some seeds, or one of them at one stage:

    python -m tests.distributed.random_models --seed 17 --stage 3
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .random_blocks import (
    BODIES,
    FUNC_BODIES,
    LENGTH,
    ONCE_DIFFERENTIABLE,
    OPAQUE_TO_FUNC,
    OUTPUTS,
    PLAIN_BODIES,
    VOCAB,
    AttributeLinear,
    AttributeViewLinear,
    Block,
    BlockSpec,
    ChunkedCrossEntropy,
    FaultInBackward,
    FusedCrossEntropy,
    Positions,
    Recompute,
    SavedLinear,
    compact,
    non_defaults,
    unpack,
)


@dataclass(frozen=True)
class Op:
    """One operation of a model's forward.

    Attributes:
        kind: "block", "direct" (a parameter of the model itself), "gain", "in place", "push" or "join" (a skip
            connection).
        block: the index of the block, or of the parameter.
        how: a key of BLOCK_CALLS or of DIRECT_CALLS.
        skip: steps in which it is left out.
    """

    kind: str
    block: int = 0
    how: str = "plain"
    skip: tuple[int, ...] = ()

    __repr__ = compact


@dataclass(frozen=True)
class Recipe:
    """A model and its training. Every default is the ordinary case, so a failure can be reduced field by field."""

    seed: int
    blocks: tuple[BlockSpec, ...] = (BlockSpec(), BlockSpec())
    ops: tuple[Op, ...] = (Op("block", 0), Op("block", 1))
    width: int = 6
    dtype: str = "float64"
    head: str = "linear"  # a key of HEADS
    positions: str = ""  # "view" or "whole": what the module of learned positions returns
    query: str = ""  # "parameter" or "leaf": what every block gets as a second argument
    tied: tuple[int, ...] = ()  # blocks that share a weight
    extras: str = "loss"  # where blocks' extra tensors go: "loss", "stream" (into the next block) or "nowhere"
    frozen: tuple[str, ...] = ()  # top-level modules
    unused: bool = False  # a top-level parameter
    output: str = "loss"  # what the model returns: "loss", "tuple" or "dict"
    # Training
    steps: int = 3
    micro_steps: int = 1
    optimizer: str = "sgd"
    clip: float = 0.0
    backward: str = "engine"  # or "plain": loss.backward()
    mode: str = "one"  # a key of random_training.MODES
    evaluate: str = ""  # "no_grad" or "inference"
    evaluate_when: str = "after step"  # or "before backward" or "before forward"
    gathered_forward: bool = False  # the forward is inside `gathered`, the backward outside
    dropped_forward: bool = False  # a forward with gradients that no backward follows
    no_sync: bool = False  # of all micro-steps but the last
    zero_grad: bool = False  # called before the first forward of each step
    toggled: int = -1  # a block that is frozen in the second step alone
    hooks: str = ""  # of the user's: "parameter", "backward", "forward" or "forward before"
    fault: str = ""  # where the first micro-step of `fault_step` raises: a key of random_training.FAULTS
    fault_step: int = 1
    fault_at: int = 0  # the operation of the forward
    fault_error: str = "RuntimeError"
    # The engine's configuration
    transport: str = "shm"
    units: tuple[str, ...] = ()
    zero: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        """What differs from the defaults, a line each."""
        return "\n".join(f"  {name} = {value!r}" for name, value in non_defaults(self).items())


# -- the model ---------------------------------------------------------------------------------------------

Function = Callable[[torch.Tensor], Any]


def _twice(function: Function, x: torch.Tensor) -> Any:
    first, extra = function(x)
    second, other = function(first)
    return second, extra if other is None or extra is None else extra + other


def _no_grad_first(function: Function, x: torch.Tensor) -> Any:
    with torch.no_grad():
        scale = function(x)[0].mean().sigmoid()
    hidden, extra = function(x)
    return hidden * scale, extra


def _stop_gradient(function: Function, x: torch.Tensor) -> Any:
    with torch.no_grad():
        constant = function(x)[0]
    return x + constant, None


def _two_streams(function: Function, x: torch.Tensor) -> Any:
    hidden, extra = function(x)
    return hidden + function(x.flip(1))[0], extra


def _checkpointed(function: Function, x: torch.Tensor, reentrant: bool) -> Any:
    return checkpoint(function, x, use_reentrant=reentrant)


def _keeping_products() -> Any:
    """Selective checkpoints: products, and views such as the transposed weight, are not computed again."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.t.default]
    return create_selective_checkpoint_contexts(kept)


def _with_saved_tensors(hooks: contextlib.AbstractContextManager[None], function: Function, x: torch.Tensor) -> Any:
    with hooks:
        return function(x)


def _hidden_alone(function: Function) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: function(x)[0]


# The first argument calls the block, and gives (hidden, extra or None).
BLOCK_CALLS: dict[str, Callable[[Function, torch.Tensor], Any]] = {
    "plain": lambda f, x: f(x),
    "twice": _twice,
    "no grad first": _no_grad_first,
    "stop gradient": _stop_gradient,
    "two streams": _two_streams,
    "reentrant": lambda f, x: _checkpointed(f, x, True),
    "reentrant, called twice": lambda f, x: _checkpointed(lambda y: _twice(f, y), x, True),
    "two reentrant": lambda f, x: _twice(lambda y: _checkpointed(f, y, True), x),
    "non-reentrant": lambda f, x: _checkpointed(f, x, False),
    "non-reentrant, called twice": lambda f, x: _checkpointed(lambda y: _twice(f, y), x, False),
    "two non-reentrant": lambda f, x: _twice(lambda y: _checkpointed(f, y, False), x),
    "nested checkpoints": lambda f, x: _checkpointed(lambda y: _twice(lambda z: _checkpointed(f, z, False), y), x, False),
    "selective": lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=_keeping_products),
    "saved on cpu": lambda f, x: _with_saved_tensors(torch.autograd.graph.save_on_cpu(), f, x),
    "saved by hooks": lambda f, x: _with_saved_tensors(saved_tensors_hooks(lambda t: (t,), lambda t: t[0]), f, x),
    "recompute": lambda f, x: (Recompute.apply(_hidden_alone(f), x), None),
    "vmap": lambda f, x: (vmap(_hidden_alone(f))(x), None),
    "func grad": lambda f, x: (x + grad(lambda y: f(y)[0].square().sum())(x), None),
}  # fmt: skip
REENTRANT = {"reentrant", "reentrant, called twice", "two reentrant", "recompute"}  # a backward in the backward
NON_REENTRANT = {"non-reentrant", "non-reentrant, called twice", "two non-reentrant", "nested checkpoints"}
# What is called: the block itself, another of its methods, or its body, so that no hook of the block runs.
TARGETS = ("forward", "keyword", "method", "body", "functional call")

DIRECT_CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "plain": F.linear,
    "saved": SavedLinear.apply,
    "attribute": AttributeLinear.apply,
    "attribute view": AttributeViewLinear.apply,
    "transposed": lambda x, w: x @ w.t(),
    "rows": lambda x, w: torch.cat([F.linear(x, rows) for rows in w.split(2)], -1),
    "no grad first": lambda x, w: F.linear(x, w) * _without_grad(x, w),
    "reentrant": lambda x, w: checkpoint(lambda y: F.linear(y, w).tanh(), x, use_reentrant=True),
    "non-reentrant": lambda x, w: checkpoint(lambda y: F.linear(y, w).tanh(), x, use_reentrant=False),
    "saved in reentrant": lambda x, w: checkpoint(lambda y: SavedLinear.apply(y, w), x, use_reentrant=True),
    "recompute": lambda x, w: Recompute.apply(lambda y: F.linear(y, w).tanh(), x),
    "regulariser": lambda x, w: x + w.square().mean() + w.norm(),
    "low rank": lambda x, w: x + (x @ w[:2].t()) @ w[:2],
}


def _without_grad(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return F.linear(x, weight).mean().sigmoid()


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

# -- features ------------------------------------------------------------------------------------------------


class Draft:
    """A recipe in the making. Features that exclude each other are told by `tags`."""

    def __init__(self, seed: int, rng: random.Random) -> None:
        self.rng, self.tags = rng, set[str]()
        self.fields: dict[str, Any] = {"seed": seed}
        self.blocks = [BlockSpec(body=rng.choice(PLAIN_BODIES)) for _ in range(rng.choice((2, 2, 3)))]
        self.ops: list[Op] = []

    def add_block(self, spec: BlockSpec, how: str = "plain") -> int:
        self.blocks.append(spec)
        self.ops.append(Op("block", len(self.blocks) - 1, how))
        return len(self.blocks) - 1

    def recipe(self) -> Recipe:
        """The recipe, in which every block is called at least once and calls come in random order."""
        called = {op.block for op in self.ops if op.kind == "block"}
        self.ops += [Op("block", index) for index in range(len(self.blocks)) if index not in called]
        self.rng.shuffle(self.ops)
        if "skip" in self.tags:
            start, stop = sorted(self.rng.sample(range(len(self.ops) + 1), 2))
            self.ops[start:stop] = [Op("push"), *self.ops[start:stop], Op("join")]
        if "in place" in self.tags:
            after = [i for i, op in enumerate(self.ops) if op == Op("block", op.block) and self._plain(op.block)]
            for index in after[:1]:
                self.ops.insert(index + 1, Op("in place"))
        if self.fields.get("fault") == "recompute":
            at = next(i for i, op in enumerate(self.ops) if op.how in REENTRANT | NON_REENTRANT and op.kind == "block")
            self.fields["fault_at"] = at
        elif "fault" in self.fields:
            at = self.rng.choice([i for i, op in enumerate(self.ops) if op == Op("block", op.block)])
            self.fields["fault_at"] = at
        return Recipe(blocks=tuple(self.blocks), ops=tuple(self.ops), **self.fields)

    def _plain(self, index: int) -> bool:
        return self.blocks[index].output == "tensor" and self.blocks[index].body in PLAIN_BODIES


Feature = Callable[[Draft, random.Random], None]
FEATURES: dict[str, tuple[float, Feature, set[str], set[str]]] = {}  # name: weight, function, tags, excluded tags


def feature(weight: float, tags: str = "", without: str = "") -> Callable[[Feature], Feature]:
    """Registers a feature under its function's name.

    Args:
        tags: words that it adds to a draft.
        without: words that a draft must not have; the words of `tags` that end in "!" are excluded, too.
    """

    def register(function: Feature) -> Feature:
        own = {tag.rstrip("!") for tag in tags.split()}
        alone = {tag.rstrip("!") for tag in tags.split() if tag.endswith("!")}
        FEATURES[function.__name__] = (weight, function, own, alone | set(without.split()))
        return function

    return register


@feature(3)
def unusual_bodies(draft: Draft, rng: random.Random) -> None:
    allowed = sorted(set(BODIES) - FUNC_BODIES - ONCE_DIFFERENTIABLE)
    for _ in range(rng.choice((1, 2))):
        draft.add_block(BlockSpec(body=rng.choice(allowed)))


@feature(1, "once", "twice differentiable")
def bodies_that_are_differentiable_once(draft: Draft, rng: random.Random) -> None:
    draft.add_block(BlockSpec(body=rng.choice(sorted(ONCE_DIFFERENTIABLE))), rng.choice(("plain", "twice")))


@feature(1.5)
def outputs_in_containers(draft: Draft, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2))):
        output = rng.choice([name for name in OUTPUTS if not name.startswith("opaque")])
        draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), output), rng.choice(("plain", "twice", "two streams")))


@feature(2)
def outputs_beside_objects(draft: Draft, rng: random.Random) -> None:
    output = rng.choice([name for name in OUTPUTS if name.startswith("opaque")])
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), output), rng.choice(("plain", "twice", "two streams")))


@feature(2)
def losses_in_attributes(draft: Draft, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2))):
        how = rng.choice(("plain", "twice", "non-reentrant", "no grad first"))
        draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), "attribute"), how)


@feature(1)
def outputs_that_are_parameters(draft: Draft, rng: random.Random) -> None:
    output = rng.choice([*OUTPUTS, "attribute"])
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), output, weight_output=True))


@feature(1)
def extras_in_the_stream(draft: Draft, rng: random.Random) -> None:
    draft.fields["extras"] = rng.choice(("stream", "stream", "nowhere"))
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), rng.choice([*OUTPUTS, "attribute"])))


@feature(2)
def blocks_called_twice(draft: Draft, rng: random.Random) -> None:
    index = rng.randrange(len(draft.blocks))
    if rng.random() < 0.5:
        draft.ops += [Op("block", index), Op("block", index)]
    else:
        draft.ops.append(Op("block", index, rng.choice(("twice", "two streams", "no grad first"))))


@feature(2, "reentrant", "grad no-input")
def reentrant_checkpoints(draft: Draft, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2))):
        spec = BlockSpec(rng.choice(PLAIN_BODIES), rng.choice(("tensor", "tensor", "tuple")))
        how = rng.choice(sorted(REENTRANT))
        draft.add_block(spec, how + rng.choice(("", "", " of method", " of body")))


@feature(2)
def non_reentrant_checkpoints(draft: Draft, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2))):
        spec = BlockSpec(rng.choice(PLAIN_BODIES), rng.choice(("tensor", "tensor", "tuple", "dict", "opaque")))
        how = rng.choice(sorted(NON_REENTRANT))
        draft.add_block(spec, how + rng.choice(("", "", " of method", " of body")))


@feature(0.7, "selective", "retain grad")
def selective_checkpoints(draft: Draft, rng: random.Random) -> None:
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), rng.choice(("tensor", "tuple"))), "selective")


@feature(1)
def hooks_of_saved_tensors(draft: Draft, rng: random.Random) -> None:
    how = rng.choice(("saved on cpu", "saved by hooks"))
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES)), how + rng.choice(("", "", " of body")))


@feature(1.5)
def calls_past_the_forward(draft: Draft, rng: random.Random) -> None:
    how = rng.choice(("plain", "twice", "no grad first", "two streams", "stop gradient"))
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES)), f"{how} of {rng.choice(('method', 'body', 'keyword'))}")


@feature(1.5, "func", "backward-hook")
def blocks_under_torch_func(draft: Draft, rng: random.Random) -> None:
    if rng.random() < 0.5:
        draft.add_block(BlockSpec(rng.choice(sorted(FUNC_BODIES))))
    else:
        body = rng.choice(sorted(set(PLAIN_BODIES) - OPAQUE_TO_FUNC - {"convolution", "attention"}))
        draft.add_block(BlockSpec(body), rng.choice(("vmap", "func grad", "plain of functional call")))


@feature(3)
def parameters_used_directly(draft: Draft, rng: random.Random) -> None:
    safe = [how for how in DIRECT_CALLS if "reentrant" not in how and how not in ("recompute", *_ATTRIBUTES)]
    for index in range(rng.choice((1, 2, 3))):
        draft.ops.append(Op("direct", rng.randrange(index + 1), rng.choice([*safe, "non-reentrant"])))


_ATTRIBUTES = ("attribute", "attribute view")


@feature(1, "reentrant", "grad no-input")
def parameters_used_in_reentrant_checkpoints(draft: Draft, rng: random.Random) -> None:
    hows = ("reentrant", "saved in reentrant", "recompute")
    draft.ops += [Op("direct", index, rng.choice(hows)) for index in range(rng.choice((1, 2)))]


@feature(1, "once", "twice")
def parameters_in_attributes_of_functions(draft: Draft, rng: random.Random) -> None:
    draft.ops.append(Op("direct", 0, rng.choice(_ATTRIBUTES)))


@feature(2, "head!")
def heads_tied_by_hand(draft: Draft, rng: random.Random) -> None:
    draft.fields["head"] = rng.choice(sorted(HAND_TIED))


@feature(1.5, "head!")
def unusual_heads(draft: Draft, rng: random.Random) -> None:
    draft.fields["head"] = rng.choice(("tied", "fused", "linear of the weight"))


@feature(1, "head! once", "twice")
def chunked_losses(draft: Draft, rng: random.Random) -> None:
    draft.fields["head"] = "chunked"


@feature(1)
def tied_blocks(draft: Draft, rng: random.Random) -> None:
    body = rng.choice(("mlp", "in place", "partly detached"))
    draft.fields["tied"] = tuple(draft.add_block(BlockSpec(body)) for _ in range(rng.choice((2, 3))))


@feature(1.5)
def learned_positions(draft: Draft, rng: random.Random) -> None:
    draft.fields["positions"] = rng.choice(("view", "view", "whole"))


@feature(1.5, "query")
def parameters_as_arguments(draft: Draft, rng: random.Random) -> None:
    draft.fields["query"] = rng.choice(("parameter", "leaf"))


@feature(1)
def skip_connections(draft: Draft, rng: random.Random) -> None:
    draft.tags.add("skip")


@feature(1, "in-place", "backward-hook")
def in_place_operations(draft: Draft, rng: random.Random) -> None:
    draft.tags.add("in place")
    draft.add_block(BlockSpec("in place"))


@feature(1)
def scalar_parameters(draft: Draft, rng: random.Random) -> None:
    draft.ops += [Op("gain")] * rng.choice((1, 2))


@feature(1)
def frozen_blocks(draft: Draft, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2))):
        draft.add_block(
            BlockSpec(rng.choice(PLAIN_BODIES), rng.choice(("tensor", "tuple")), frozen=rng.choice(("part", "all")))
        )


@feature(0.7, "no-input", "reentrant")
def frozen_embeddings(draft: Draft, rng: random.Random) -> None:
    draft.fields["frozen"] = rng.choice((("tok",), ("tok", "norm"), ("norm",)))


@feature(1)
def unused_parameters(draft: Draft, rng: random.Random) -> None:
    draft.fields["unused"] = rng.random() < 0.5
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), unused=True))


@feature(1.5, "skipped")
def blocks_left_out_in_some_steps(draft: Draft, rng: random.Random) -> None:
    index = draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES)))
    draft.ops[-1] = Op("block", index, "plain", rng.choice(((0,), (1,), (0, 2), (1, 2))))


# -- features of training ------------------------------------------------------------------------------------


@feature(3)
def accumulation(draft: Draft, rng: random.Random) -> None:
    draft.fields["micro_steps"] = rng.choice((2, 2, 3))
    draft.fields["no_sync"] = rng.random() < 0.25
    draft.fields["steps"] = 2


@feature(1, "mode! retain", "selective")
def several_losses(draft: Draft, rng: random.Random) -> None:
    draft.fields["mode"] = rng.choice(("two losses", "one loss twice", "partial backward"))
    draft.fields["output"] = rng.choice(("tuple", "dict"))


@feature(1, "mode!")
def several_forwards(draft: Draft, rng: random.Random) -> None:
    draft.fields["mode"] = rng.choice(("two forwards", "two forwards, first first", "cached gradients"))
    draft.fields["output"] = rng.choice(("tuple", "dict"))


@feature(1.5, "mode! grad", "reentrant selective")
def gradients_before_the_backward(draft: Draft, rng: random.Random) -> None:
    draft.fields["mode"] = rng.choice(("grad first", "grad of some first", "grad alone first", "backward of some"))


@feature(1, "mode! grad twice", "reentrant once selective")
def gradient_penalties(draft: Draft, rng: random.Random) -> None:
    draft.fields["mode"] = rng.choice(("penalty on parameters", "penalty on hidden"))
    draft.fields["output"] = rng.choice(("tuple", "dict"))


@feature(1.5)
def evaluation_in_between(draft: Draft, rng: random.Random) -> None:
    draft.fields["evaluate"] = rng.choice(("no_grad", "inference"))
    draft.fields["evaluate_when"] = rng.choice(("after step", "before backward", "before forward"))


@feature(1)
def forwards_inside_gathered(draft: Draft, rng: random.Random) -> None:
    draft.fields["gathered_forward"] = True


@feature(0.7)
def forwards_without_backward(draft: Draft, rng: random.Random) -> None:
    draft.fields["dropped_forward"] = True


@feature(1.5, "fault!")
def exceptions_in_the_forward(draft: Draft, rng: random.Random) -> None:
    draft.fields["fault"] = rng.choice(("forward", "forward", "hook", "hook after"))
    draft.fields["fault_error"] = rng.choice(("RuntimeError", "KeyboardInterrupt"))
    draft.fields["fault_step"] = rng.randrange(2)


@feature(1.5, "fault!")
def exceptions_in_the_backward(draft: Draft, rng: random.Random) -> None:
    draft.fields["fault"] = rng.choice(("backward", "backward", "recompute"))
    if draft.fields["fault"] == "recompute":
        draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES)), "non-reentrant")
    draft.fields["fault_error"] = rng.choice(("RuntimeError", "KeyboardInterrupt"))
    draft.fields["fault_step"] = rng.randrange(2)


@feature(1, "backward-hook", "in-place func")
def hooks_of_the_user(draft: Draft, rng: random.Random) -> None:
    draft.fields["hooks"] = rng.choice(("parameter", "backward", "forward", "forward before"))


@feature(0.7)
def blocks_frozen_for_a_step(draft: Draft, rng: random.Random) -> None:
    draft.fields["toggled"] = rng.randrange(len(draft.blocks))


def draw_features(seed: int) -> list[str]:
    """The names of a seed's features, in the order in which they were drawn."""
    return _draw(Draft(seed, random.Random(seed)))


def _draw(draft: Draft) -> list[str]:
    left, drawn = dict(FEATURES), []
    for _ in range(draft.rng.randint(3, 6)):
        weights = {name: weight for name, (weight, _, _, without) in left.items() if not without & draft.tags}
        (name,) = draft.rng.choices(list(weights), list(weights.values()))
        _, function, tags, _ = left.pop(name)
        draft.tags |= tags
        function(draft, draft.rng)
        drawn.append(name)
    return drawn


def random_recipe(seed: int) -> Recipe:
    """The recipe of a seed: the same on every machine and in every process."""
    rng = random.Random(seed)
    draft = Draft(seed, rng)
    _draw(draft)
    fields = draft.fields
    fields["width"] = rng.choice((5, 6, 8))
    fields["dtype"] = rng.choice(("float64",) * 4 + ("float32",))
    fields["optimizer"] = rng.choice(("sgd", "momentum", "adamw", "adamw in groups"))
    fields["clip"] = rng.choice((0.0, 0.3))
    fields["backward"] = rng.choice(("engine", "plain"))
    fields["zero_grad"] = rng.random() < 0.2
    fields.setdefault("output", rng.choice(("loss", "tuple", "dict")))
    fields["transport"] = ("shm", "gloo")[seed % 2]
    fields["units"] = rng.choice(((),) * 5 + (("blocks.*", "tok", "norm"), ("blocks.*.body",), ("blocks", "tok")))
    fields["zero"] = rng.choice(
        (
            (),
            (),
            (("prefetch_bucket_size", 0),),
            (("overlap_comm", False),),
            (("reduce_bucket_size", 50),),
            (("param_persistence_threshold", 100),),
            (("max_live_parameters", 200),),
        )
    )
    return draft.recipe()


if __name__ == "__main__":
    from tests.distributed.random_training import main

    main()
