"""Copy many tensors into their places in a gradient buffer, and cast them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeroengine.ops import _cuda_library
from zeroengine.ops._cuda_library import CudaCopy
from zeroengine.ops._library import DTYPE_CODES


def cast_copy(sources: Sequence[Tensor], targets: Sequence[Tensor], *, accumulate: bool = False) -> None:
    """Set each target to its source, computed in float32 and rounded once, to nearest even.

    On CUDA every 64 tensors take one launch, and the host does not wait.

    Args:
        sources: float32, bfloat16 or float16, of any strides.
        targets: One for each source, of as many elements, contiguous, all in one of these dtypes. They must not overlap
            one another or a source.
        accumulate: Whether to add to the targets instead.
    """
    for source, target in zip(sources, targets, strict=True):
        assert {source.dtype, target.dtype} <= DTYPE_CODES.keys(), (source.dtype, target.dtype)
        assert source.numel() == target.numel() and target.is_contiguous(), (source.shape, target.shape)
        # One launch writes one dtype on one device. Sources may differ in dtype.
        assert target.dtype is targets[0].dtype and source.device == target.device == targets[0].device
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
        arguments = (copies, len(targets), DTYPE_CODES[targets[0].dtype], 1.0, accumulate)
        return _cuda_library.call(cuda, "ze_cuda_cast", device, *arguments)
    for source, target in zip(sources, targets, strict=True):
        # A source may have another shape with as many elements.
        source = source.reshape(target.shape)
        target.copy_(target.float() + source.float() if accumulate else source)
