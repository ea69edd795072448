"""The weights of an engine as what vLLM calls a `WeightSource`. vLLM is no dependency.

https://docs.vllm.ai/en/latest/training/weight_transfer/. A trainer engine of vLLM tells its workers the names, dtypes
and shapes, and sends tensors by one of its backends. Those that broadcast send packed buffers: whole tensors one behind
the other, up to the first one with which a buffer exceeds the size that both sides know. A bucket of the source is one
such buffer.

[Note: Pieces of ranks]
`iter_local` of vLLM 0.33 yields one piece of each tensor on each rank, as `torch.chunk` divides a dimension over a
mesh. A shard begins and ends anywhere in a tensor, so ranks exchange the elements of a piece that lie on other ranks:
at most one piece comes to a rank, and no tensor is gathered. vLLM takes even pieces alone. Tensors whose rows do not
divide, and those that are computed from others, are whole on every rank, and are gathered if they are partitioned.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard

from zeroengine.partition.replicas import ReplicaLayout
from zeroengine.utils.formats import round_up
from zeroengine.weights.selection import OutgoingTensor, Slot
from zeroengine.weights.stream import PlanBuckets, Run, WeightStream

# Opens a stream of buckets that a plan has, of whole tensors or in pieces: see `StreamArguments`. A collective.
OpenStream = Callable[[PlanBuckets, bool], WeightStream]


class ParamMeta(NamedTuple):
    """A tensor's name, dtype and shape, and which ranks have which piece of it, as vLLM's class."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


class Metadata(list[Any]):
    """Serves vLLM 0.33, which reads it as an attribute, and vLLM 0.28 to 0.32, which call it."""

    def __call__(self) -> Metadata:
        """Return the list."""
        return self


def num_pieces(tensor: OutgoingTensor) -> int:
    """Return over how many ranks the rows of a tensor are divided. 1: every rank has the whole tensor."""
    if not isinstance(tensor.source, Slot) or not tensor.spec.shape:
        return 1
    degree = tensor.source.unit.degrees.parameters
    return 1 if tensor.spec.shape[0] % degree else degree


def plan_packed_buffers(
    tensors: Sequence[OutgoingTensor], buffer_bytes: int, rank: int | None = None
) -> list[list[Run]]:
    """Divide tensors, in their order, into those of each packed buffer of vLLM.

    Args:
        tensors: The tensors.
        buffer_bytes: The size that a buffer exceeds with its last tensor.
        rank: The rank whose pieces are taken. None: whole tensors are.
    """
    buffers: list[list[Run]] = [[]]
    nbytes = 0
    for tensor in tensors:
        count = 1 if rank is None else num_pieces(tensor)
        index, numel, itemsize = (rank or 0) % count, tensor.spec.numel // count, tensor.spec.dtype.itemsize
        # vLLM has no gaps between tensors. Those of a bucket do not count.
        if nbytes > buffer_bytes:
            buffers.append([])
            nbytes = 0
        nbytes += numel * itemsize
        offset = round_up(buffers[-1][-1].end, itemsize) if buffers[-1] else 0
        row = index * (tensor.spec.shape[0] // count) if count > 1 else 0
        buffers[-1].append(Run(tensor, row, index * numel, numel, offset))
    return buffers


class VllmWeightSource:
    """The weights of an engine for the trainer engines of vLLM 0.28 to 0.33. Every rank calls and iterates alike.

    Args:
        open_stream: See there.
        replicas: The ranks. Replicas that train apart have other weights, so those of the first one are sent.
        receiver: The only rank that gets whole tensors. None: all of them do.
        in_pieces: Whether ``iter_local`` yields pieces where it can. False: whole tensors.
    """

    def __init__(
        self, open_stream: OpenStream, replicas: ReplicaLayout, receiver: int | None, *, in_pieces: bool
    ) -> None:
        self._open_stream, self._replicas, self._receiver = open_stream, replicas, receiver
        self._in_pieces = in_pieces and receiver is None

    @cached_property
    def metadata(self) -> Metadata:
        """All tensors in the order of iterations, equal on every rank. The first read is a collective."""
        try:
            # vLLM looks for objects of its own classes. Before 0.33 it has none for placements.
            base = importlib.import_module("vllm.distributed.weight_transfer.base")
            shard, replicate, meta = base.Shard, base.Replicate, base.ParamMeta
        except (ImportError, AttributeError):
            shard, replicate, meta = Shard, Replicate, ParamMeta
        tensors: list[OutgoingTensor] = []

        def plan(outgoing: Sequence[OutgoingTensor], _: int) -> list[list[Run]]:
            """Keep the tensors, and put none into a bucket."""
            tensors.extend(outgoing)
            return []

        with self._open_stream(plan, False):
            pass
        world_size = self._replicas.ranks_per_replica
        some = None if self._replicas.num_replicas == 1 else tuple(range(world_size))
        some = some if self._receiver is None else (self._receiver,)
        metadata = Metadata()
        for tensor in tensors:
            layout: dict[str, Any] = {"owners": some}
            if self._in_pieces and (count := num_pieces(tensor)) > 1:
                layout["owners"], layout["mesh_shape"] = tuple(range(world_size)), (world_size // count, count)
                layout["placements"] = (replicate(), shard(0))
            metadata.append(meta(tensor.name, tensor.spec.dtype, tensor.spec.shape, **layout))
        return metadata

    def owned_names(self, rank: int) -> list[str]:
        """Return the names that iterations yield on a rank."""
        return [meta.name for meta in self.metadata if meta.owners is None or rank in meta.owners]

    def implements_iter_full(self) -> bool:
        """Return True: vLLM asks before it iterates."""
        return True

    implements_iter_local = implements_iter_full

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and whole tensors."""
        yield from self._pairs(self._open_stream(plan_packed_buffers, False))

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and this rank's pieces, which the metadata describe. See "Pieces of ranks" above."""
        plan = partial(plan_packed_buffers, rank=self._replicas.local_rank if self._in_pieces else None)
        yield from self._pairs(self._open_stream(plan, self._in_pieces))

    # vLLM 0.28 to 0.32 iterate over the source itself.
    __iter__ = iter_full

    def _pairs(self, opened: WeightStream) -> Iterator[tuple[str, torch.Tensor]]:
        with opened as stream:
            # vLLM refers to the tensors of two packed buffers, and drops the older one before it asks for the third. So
            # nothing is filled before.
            for bucket in iter(stream.next_bucket, None):
                for run in bucket.runs if self._receiver is not None or self._replicas.replica == 0 else ():
                    yield run.tensor.name, bucket.piece(run).values
