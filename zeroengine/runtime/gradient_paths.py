"""Let a backward come to a module whose output depends on no trainable parameter on this rank.

[Note: Backwards of ranks that call no trainable item]
Experts may be trained while everything before them is frozen. On a rank that calls some of a mixture's experts, the
output requires gradients. The backward then comes to the mixture, and to the frozen units after it, and gathers them.
On a rank that calls none it would come to neither. So the output there becomes that of a node without gradients, and
the backwards of all ranks come to the same units.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroengine.utils.tensors import map_tensors


class _WithoutGradients(torch.autograd.Function):
    """Copy a tensor. The copy requires gradients, because the other input does, and the backward computes none."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, requires_grad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(requires_grad)
        # A view would refuse to be changed in place.
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        # An activation checkpoint runs its modules again when a saved tensor is read, and does so on the other ranks.
        _ = ctx.saved_tensors
        return None, None


def require_gradients(output: Any) -> Any:
    """Return ``output`` with copies of its tensors that require gradients.

    Args:
        output: What a module returned. Tensors of one dimension, such as counts and losses, remain as they are.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad or not tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        return _WithoutGradients.apply(tensor, torch.empty(0, requires_grad=True))  # type: ignore[no-any-return, no-untyped-call]

    return map_tensors(copy, output)
