"""Keep torch from copying the weights of linear layers of a frozen model."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from torch import nn


# torch multiplies an input of shape (batch, tokens, width) as one matrix. If the input has other strides than a
# contiguous one, such as the last token of each sequence in a generation, it does so only where the weight requires a
# gradient. Otherwise it multiplies sample by sample, and on the CPU, in bf16 or fp16, copies the weight for each: 2 GB
# for the head of a Llama and 16 sequences, and hundreds of times the time (torch 2.13). The strides count even where a
# size is 1, so that ``is_contiguous`` says nothing.
def pass_contiguous_inputs(model: nn.Module, undo: ExitStack) -> None:
    """Let the linear layers of ``model``, none of whose parameters requires a gradient, get contiguous inputs.

    Args:
        model: The model.
        undo: Removes the hooks.
    """
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype in (torch.bfloat16, torch.float16):
            undo.callback(module.register_forward_pre_hook(_contiguous).remove)


def _contiguous(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if len(args) != 1 or type(args[0]) is not torch.Tensor or args[0].dim() < 3:
        return None
    x = args[0]
    if all(outer == inner * size for (outer, inner), size in zip(pairwise(x.stride()), x.shape[1:], strict=True)):
        return None
    # A view of a view has the strides of its shape.
    return (x.contiguous().view(-1, x.shape[-1]).view(x.shape),)
