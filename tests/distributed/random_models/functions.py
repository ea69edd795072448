"""Autograd functions that read a weight in their backward, run a backward in it, or raise in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class SavedLinear(Function):
    """`F.linear` that keeps its weight by `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class AttributeLinear(Function):
    """`F.linear` that keeps its weight as an attribute of `ctx`, which no saved-tensor hook sees."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ ctx.weight, grad.flatten(0, -2).t() @ ctx.x.flatten(0, -2)


class AttributeViewLinear(Function):
    """As `AttributeLinear`, with a view of the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.transposed = x, weight.detach().t()
        return x @ ctx.transposed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ ctx.transposed.t(), grad.flatten(0, -2).t() @ ctx.x.flatten(0, -2)


class FusedCrossEntropy(Function):
    """The mean cross entropy of `hidden @ weight.T`, whose logits are computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        return F.cross_entropy(hidden @ weight.t(), labels)

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        hidden, weight, labels = ctx.saved_tensors
        errors = (hidden @ weight.t()).softmax(-1) - F.one_hot(labels, weight.shape[0])
        errors = errors * scale / len(labels)
        return errors @ weight, errors.t() @ hidden, None


class ChunkedCrossEntropy(Function):
    """As `FusedCrossEntropy`, whose forward computes the gradients of each chunk by autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            return F.cross_entropy(hidden @ weight.t(), labels)
        total, grad_weight, grads = hidden.new_zeros(()), torch.zeros_like(weight), []
        for part, targets in zip(hidden.split(3), labels.split(3), strict=True):
            with torch.enable_grad():
                part, leaf = part.detach().requires_grad_(), weight.detach().requires_grad_()
                loss = F.cross_entropy(F.linear(part, leaf), targets, reduction="sum") / len(labels)
                of_part, of_weight = torch.autograd.grad(loss, (part, leaf))
            total, grad_weight = total + loss.detach(), grad_weight + of_weight
            grads.append(of_part)
        ctx.save_for_backward(torch.cat(grads), grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * scale, grad_weight * scale, None


class Recompute(Function):
    """A checkpoint of one's own: the backward calls `function` again, and runs a backward inside the backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = ctx.function(leaf)
        torch.autograd.backward(out, grad)
        return None, leaf.grad


class FaultInBackward(Function):
    """The identity, whose backward raises what `switch.fault` holds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, switch: Any) -> torch.Tensor:
        ctx.switch = switch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.switch.fault is not None:
            raise ctx.switch.fault
        return grad, None
