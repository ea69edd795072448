"""The weights of an engine as what vLLM calls a `WeightSource`, without importing vLLM.

https://docs.vllm.ai/en/latest/training/weight_transfer/. A trainer engine of vLLM tells its workers the names, dtypes
and shapes, and sends packed buffers by one of its backends. A packed buffer has whole tensors one behind the other, up
to the first one with which it exceeds the size that both sides know. A bucket of the source is one such buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from zeroengine.utils.rounding import round_up
from zeroengine.weights.selection import OutgoingTensor
from zeroengine.weights.stream import Run, WeightStream


def plan_packed_buffers(tensors: Sequence[OutgoingTensor], buffer_bytes: int) -> list[list[Run]]:
    """Divide tensors, in their order, into those of each packed buffer of vLLM."""
    buffers: list[list[Run]] = [[]]
    for tensor in tensors:
        # vLLM has no gaps between tensors. Those of a bucket do not count.
        if sum(run.tensor.spec.nbytes for run in buffers[-1]) > buffer_bytes:
            buffers.append([])
        offset = round_up(buffers[-1][-1].end, tensor.spec.dtype.itemsize) if buffers[-1] else 0
        buffers[-1].append(Run(tensor, 0, 0, tensor.spec.numel, offset))
    return buffers


class TensorMetadata(NamedTuple):
    """A tensor's name, dtype and shape, as vLLM's `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class VllmWeightSource:
    """The weights of an engine for the trainer engines of vLLM.

    Args:
        open_stream: Opens a stream of whole tensors. A collective.
    """

    def __init__(self, open_stream: Callable[[], WeightStream]) -> None:
        self._open_stream = open_stream

    def metadata(self) -> list[TensorMetadata]:
        """Return what an iteration yields. Call it on every rank."""
        with self._open_stream() as stream:
            return [TensorMetadata(name, spec.dtype, spec.shape) for name, spec in stream.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and values. Iterate on every rank; the values come on rank 0 alone."""
        with self._open_stream() as stream:
            # vLLM refers to the tensors of two packed buffers, and drops the older one before it asks for the third. So
            # nothing is filled before.
            for bucket in iter(stream.next_bucket, None):
                for run in bucket.runs:
                    yield run.tensor.name, bucket.piece(run).values
