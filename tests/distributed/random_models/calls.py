"""Ways to call a block, and to use a parameter of the model itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.distributed.random_models.functions import AttributeLinear, AttributeViewLinear, Recompute, SavedLinear

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


def _inner_checkpoint(function: Function) -> Function:
    return lambda x: _checkpointed(function, x, False)


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
    "nested checkpoints": lambda f, x: _checkpointed(lambda y: _twice(_inner_checkpoint(f), y), x, False),
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
