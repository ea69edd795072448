"""Lets autograd add up the gradients of a tied parameter in place.

[Note: Sums of gradients]
Autograd holds the first gradient of a parameter that two layers share, and adds the second one to it: in place if
nothing else refers to the memory of the first, otherwise into a third tensor of as many bytes. The gradient that a
linear layer gives its weight is the transpose of a product, which is a view and refers to the product's tensor. So it
is replaced by a tensor that has the same memory and is no view. The sum has the same bits.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.utils.tensors import tensors_in
from zeroengine.utils.torch_internals import functorch_active

# The most nodes behind the output of a layer that are looked at. Between an output and a weight there are a few.
MAX_NODES = 16


def add_in_place(model: nn.Module) -> list[Any]:
    """Register hooks on the layers of ``model`` that share a parameter. Return their handles."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for param in dict.fromkeys(module.parameters(recurse=False)):
            owners.setdefault(param, []).append(module)
    layers = dict.fromkeys(layer for modules in owners.values() if len(modules) > 1 for layer in modules)
    return [layer.register_forward_hook(UncopiedHook(_replace_views_of_gradients)) for layer in layers]


def _replace_views_of_gradients(layer: nn.Module, args: Any, output: Any) -> None:
    """Let the nodes that give gradients to the parameters of ``layer`` give tensors that are no views."""
    if not torch.is_grad_enabled() or functorch_active():
        return
    params = {id(param) for param in layer.parameters(recurse=False)}
    nodes = deque(tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None)
    for _ in range(MAX_NODES):
        if not nodes:
            return
        node = nodes.popleft()
        below = [inner for inner, _ in node.next_functions if inner is not None]
        nodes.extend(below)
        if any(id(getattr(inner, "variable", None)) in params for inner in below):
            node.register_hook(_without_views)


def _without_views(gradients: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...] | None:
    # A backward with create_graph=True gives the gradients a history.
    if torch.is_grad_enabled() or all(gradient is None or gradient._base is None for gradient in gradients):
        return None
    return tuple(None if gradient is None else gradient.data for gradient in gradients)
