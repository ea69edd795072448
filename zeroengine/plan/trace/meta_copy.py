"""Copy a module without its memory, and make batches of the shape of an example."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.slices import slice_of
from zeroengine.plan.trace.model_facts import Batch, as_batch
from zeroengine.runtime.quantized_parameters import library_of, replace_quantized_parameters, shared_by_copies
from zeroengine.utils.tensors import map_tensors, tensors_in


def copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy of `model` with its parameters and buffers on the meta device. `model` stays as it is.

    A parameter that has note of a slice (``split_facts``) is that slice in the copy.

    Raises:
        ZeroEngineError: The module cannot be copied.
    """
    # The copy finds every tensor in the memo, so that it allocates none of them.
    memo: dict[int, Any] = {
        id(param): nn.Parameter(torch.empty_like(_own_part(param), device="meta"), requires_grad=param.requires_grad)
        for param in model.parameters()
        if not library_of(param)
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    memo |= {id(shared): shared for shared in shared_by_copies(model)}
    try:
        replica = copy.deepcopy(model, memo)
    except Exception as error:
        raise ZeroEngineError(
            f"plan() cannot copy the model ({type(model).__name__}): {type(error).__name__}: {error}. Pass the "
            'function that builds it instead, as "module:function"'
        ) from error
    replace_quantized_parameters(replica, lambda tensor: torch.empty_like(tensor, device="meta"))
    return replica


def _own_part(param: nn.Parameter) -> torch.Tensor:
    part = slice_of(param)
    return param if part is None else part.cut(param.detach())


def batches_like(example: Any) -> Callable[[int], Batch]:
    """Return a function that makes a batch of so many samples, with tensors on the meta device.

    Args:
        example: Arguments of a model's forward: a tensor, a tuple, or a dict of keyword arguments. The samples are the
            first dimension of tensors.

    Raises:
        ZeroEngineError: The example holds no tensor.
    """
    sizes = [len(tensor) for tensor in tensors_in(example) if tensor.dim()]
    if not sizes:
        raise ZeroEngineError(
            "plan(): example holds no tensor. Pass arguments of the model's forward, such as example=(ids, labels) or "
            'example={"input_ids": ids, "labels": ids}'
        )

    def make_batch(samples: int) -> Batch:
        def resized(tensor: torch.Tensor) -> torch.Tensor:
            has_samples = tensor.dim() > 0 and len(tensor) == sizes[0]
            shape = (samples, *tensor.shape[1:]) if has_samples else tensor.shape
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        args, kwargs = as_batch(map_tensors(resized, example))
        return args, kwargs

    return make_batch
