"""Count the floating-point operations of one operation of PyTorch; a multiplication and an addition are two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from zeroengine.utils.torch_internals import cpu_attention, cpu_attention_backward, grouped_mm

_aten = torch.ops.aten


def flops_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> int:
    """Return the operations of matrix products, convolutions and attention; 0 for everything else.

    Args:
        function: What a ``TorchDispatchMode`` is called with.
        args: Its arguments.
        kwargs: Its keyword arguments.
        output: What it returned.
    """
    packet = getattr(function, "overloadpacket", function)
    formula = _FORMULAS.get(packet)
    if formula is not None:
        return formula(*args, **kwargs)
    return int(flop_registry[packet](*args, **kwargs, out_val=output)) if packet in flop_registry else 0


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Return the arithmetic of attention as ``torch.utils.flop_counter`` counts it: without regard to causality."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[2] * (width + value.shape[3]))


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    # Two products are repeated, and each of them has two gradients. One of the repeated products has no use there.
    return _attention_flops(query, key, value) * 5 // 2


def _grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    # Each row meets the matrix of one group, or the groups divide the sum.
    return int(2 * a.shape[-2] * a.shape[-1] * b.shape[-1])


# Formulas that torch lacks: attention on a CPU, the experts of a mixture, and a product that is added in place.
_FORMULAS: dict[Any, Callable[..., int]] = {
    cpu_attention: _attention_flops,
    cpu_attention_backward: _attention_backward_flops,
    grouped_mm: _grouped_flops,
    _aten.addmm_: lambda _, a, b, **__: _grouped_flops(a, b),
}
