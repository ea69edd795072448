"""Digests of what a model is given, by which ranks compare their inputs."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from zeroengine.ops import digest
from zeroengine.utils.tensors import leaves_in, to_device
from zeroengine.utils.torch_internals import functorch_active, tracing_state

# The most elements of a tensor that are read. They are spread evenly over a larger tensor.
MAX_ELEMENTS = 1 << 20
# The sum of two digests of this many bits is exact in float64.
DIGEST_BITS = 51
DIGEST_MASK = (1 << DIGEST_BITS) - 1


def digest_inputs(inputs: Any, device: torch.device) -> torch.Tensor | None:
    """Return the digest of tensors and numbers in nested containers, without waiting for ``device``.

    Returns:
        A positive whole number, 0-d float64, on ``device``. None if there is nothing to compare: no tensor with a
        dimension, because one number may be the same on all ranks by chance; or an object or a tensor whose values
        cannot be read.
    """
    texts: list[str] = []
    # The sums over tensors in CPU memory, and over those on a GPU.
    on_host, on_device = 0, torch.zeros((), dtype=torch.int64, device=device)
    has_data = False
    for place, leaf in enumerate(leaves_in(inputs)):
        if isinstance(leaf, torch.Tensor):
            # If a tensor cannot be read, the rest of the input could be equal by chance.
            if not _is_readable(leaf, device):
                return None
            texts.append(f"{tuple(leaf.shape)} {leaf.dtype}")
            has_data = has_data or leaf.dim() > 0
            # The odd factor makes the digest depend on the order of tensors, and loses no bits modulo a power of two.
            part = sample_digest(leaf) * (2 * place + 1)
            if leaf.device.type == "cpu":
                on_host += int(part)
            else:
                on_device = on_device + part
        elif isinstance(leaf, (type(None), bool, int, float, str)):
            texts.append(repr(leaf))
        else:
            return None
    if not has_data:
        return None
    # The last bit is set, so that no digest of inputs is 0, which stands for inputs that cannot be compared.
    on_host = (on_host + zlib.crc32("\n".join(texts).encode())) & DIGEST_MASK | 1
    return to_device([on_host], device)[0] + (on_device & DIGEST_MASK)


def can_read_values(device: torch.device) -> bool:
    """Return whether inputs of a forward have values that may be read now.

    Reading them raises an error in torch.func, becomes a part of a trace, and breaks a capture of a CUDA graph.
    """
    if functorch_active() or tracing_state() is not None:
        return False
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _is_readable(tensor: torch.Tensor, device: torch.device) -> bool:
    return (
        # The operations below may compute something else in a subclass, or may communicate, as with a DTensor.
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and (tensor.device.type == "cpu" or tensor.device == device)
    )


def sample_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest of ``tensor`` or, if it is large, of a sample: 0-d int64, on its device."""
    flat = tensor.detach().reshape(-1)
    # The stride is rounded up, so at most MAX_ELEMENTS are read, and a large input costs no more than a small one.
    return digest(flat[:: max(1, -(-flat.numel() // MAX_ELEMENTS))])
