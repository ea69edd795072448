"""Copy many tensors into their places in a gradient buffer, and cast them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroengine.errors import ZeroEngineError
from zeroengine.ops import _cuda_library
from zeroengine.ops._cuda_library import CudaCopy
from zeroengine.ops._library import DTYPE_CODES


def cast_copy(
    sources: Sequence[Tensor], targets: Sequence[Tensor], *, scale: float = 1.0, accumulate: bool = False
) -> None:
    """Set each target to its source times `scale`, computed in float32 and rounded once, to nearest even.

    On CUDA every 64 tensors take one launch, and the host does not wait.

    Args:
        sources: float32, bfloat16 or float16, of any strides.
        targets: One for each source, of as many elements, contiguous, all in one of these dtypes. They must not overlap
            one another or a source.
        scale: Multiplies every source.
        accumulate: Whether to add to the targets instead.

    Raises:
        ZeroEngineError: The tensors do not pair up like this, or are on different devices.
    """
    if len(sources) != len(targets):
        raise ZeroEngineError(f"cast_copy: {len(sources)} sources and {len(targets)} targets; pass a target for each")
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        _check(i, source, target, targets[0])
    if not sources:
        return
    device = targets[0].device
    if (cuda := _cuda_library.cuda_library(device)) is not None:
        # Copies of sources with other strides must live until the launch is issued.
        contiguous_sources = [source.contiguous() for source in sources]
        copies = (CudaCopy * len(targets))(
            *(
                CudaCopy(source.data_ptr(), target.data_ptr(), target.numel(), DTYPE_CODES[source.dtype])
                for source, target in zip(contiguous_sources, targets, strict=True)
            )
        )
        arguments = (copies, len(targets), DTYPE_CODES[targets[0].dtype], scale, accumulate)
        return _cuda_library.call(cuda, "ze_cuda_cast", device, *arguments)
    for source, target in zip(sources, targets, strict=True):
        # A source may have another shape with as many elements.
        source = source.reshape(target.shape)
        # As in the kernel, the scale is rounded to fp32 first.
        if scale != 1:
            source = source.float() * torch.tensor(scale, dtype=torch.float32, device="cpu")
        target.copy_(target.float() + source.float() if accumulate else source)


def _check(i: int, source: Tensor, target: Tensor, first: Tensor) -> None:
    if source.dtype not in DTYPE_CODES or target.dtype not in DTYPE_CODES:
        raise ZeroEngineError(
            f"cast_copy: pair {i} casts {source.dtype} to {target.dtype}; pass {', '.join(map(str, DTYPE_CODES))}"
        )
    if source.numel() != target.numel() or not target.is_contiguous():
        raise ZeroEngineError(
            f"cast_copy: pair {i} has {source.numel()} elements and a target of shape {tuple(target.shape)} and "
            f"strides {target.stride()}; pass a contiguous target of as many"
        )
    # One launch writes one dtype on one device. Sources may differ in dtype.
    if target.dtype != first.dtype or {source.device, target.device} != {first.device}:
        raise ZeroEngineError(
            f"cast_copy: pair {i} goes from {source.device} to {target.dtype} on {target.device}, but target 0 is "
            f"{first.dtype} on {first.device}; pass targets of one dtype, all on one device"
        )
