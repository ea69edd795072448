"""A stream of whole tensors out of an engine, in buckets of bounded size.

[Note: How a stream ends]
Before each bucket, and after the last one, the ranks exchange whether all of them go on. So a consumer that raises, or
that leaves the stream early, ends it on all ranks, and no rank changes values that another one still reads. Until then
every other call of the engine is refused.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zeroengine.comm.group import Group
from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.utils.formats import format_byte_size, round_up
from zeroengine.utils.torch_internals import storage_address, storage_use_count
from zeroengine.weights.changes import WeightsToken
from zeroengine.weights.huggingface_format import TensorSpec
from zeroengine.weights.selection import OutgoingTensor
from zeroengine.weights.tensor_reads import TensorReads

log = logging.getLogger("zeroengine")

# The owners of a bucket's storage besides the tensors of the consumer: the storage's Python object and the bucket.
NUM_OWN_TENSORS = 2
# Any call of one rank ends the stream on all ranks.
CALL = "stream_weights()"


@dataclass(frozen=True)
class WeightPiece:
    """A tensor of a stream, or some rows of one that is larger than a bucket.

    A whole tensor unpacks as a pair: `for name, values in stream`.

    Attributes:
        name: The tensor's name.
        values: The values, in the memory of a bucket, which is not used again as long as anything refers to it.
        row: The first of the rows.
        shape: The shape of the whole tensor.
    """

    name: str
    values: torch.Tensor
    row: int
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether these are all values of the tensor."""
        return tuple(self.values.shape) == self.shape

    def __iter__(self) -> Iterator[Any]:
        """Yield the name and the values.

        Raises:
            ZeroEngineError: These are some rows alone.
        """
        if not self.is_whole:
            raise ZeroEngineError(
                f"{self.name} of shape {self.shape} is larger than a bucket, and comes in pieces of rows: raise "
                "bucket_bytes, or take `for piece in stream`, with piece.name, piece.values, piece.row and piece.shape"
            )
        return iter((self.name, self.values))


class Run(NamedTuple):
    """Rows of a tensor in a bucket: the first row, the first element, how many, and the first byte in the bucket."""

    tensor: OutgoingTensor
    row: int
    start: int
    numel: int
    offset: int

    @property
    def end(self) -> int:
        """The byte of the bucket after the last one."""
        return self.offset + self.numel * self.tensor.spec.dtype.itemsize


class Bucket(NamedTuple):
    """A bucket of a stream: its bytes (1-D, uint8), and what lies in them."""

    memory: torch.Tensor
    runs: Sequence[Run]

    def values(self, run: Run) -> torch.Tensor:
        """Return the values of a run, 1-D."""
        return self.memory[run.offset : run.end].view(run.tensor.spec.dtype)

    def piece(self, run: Run) -> WeightPiece:
        """Return the piece of a run."""
        shape = run.tensor.spec.shape
        sizes = shape if run.numel == run.tensor.spec.numel else (-1, *shape[1:])
        return WeightPiece(run.tensor.name, self.values(run).view(sizes), run.row, shape)


# Divides tensors into buckets of so many bytes.
PlanBuckets = Callable[[Sequence[OutgoingTensor], int], list[list[Run]]]


def plan_buckets(tensors: Sequence[OutgoingTensor], bucket_bytes: int) -> list[list[Run]]:
    """Divide tensors, in their order, into buckets of at most `bucket_bytes`.

    Raises:
        ZeroEngineError: One row of a tensor is larger than a bucket.
    """
    buckets: list[list[Run]] = [[]]
    for tensor in tensors:
        shape, itemsize = tensor.spec.shape, tensor.spec.dtype.itemsize
        num_rows = shape[0] if shape else 1
        row_numel = math.prod(shape[1:])
        # A tensor that fits into a bucket is not cut.
        rows_in_bucket = bucket_bytes // max(row_numel * itemsize, 1)
        if not rows_in_bucket:
            raise ZeroEngineError(
                f"bucket_bytes={bucket_bytes} is less than one row of {tensor.name} {shape}: write at least "
                f"{row_numel * itemsize}"
            )
        for row in range(0, max(num_rows, 1), rows_in_bucket):
            numel = min(num_rows - row, rows_in_bucket) * row_numel
            offset = round_up(buckets[-1][-1].end, itemsize) if buckets[-1] else 0
            if offset + numel * itemsize > bucket_bytes:
                buckets.append([])
                offset = 0
            buckets[-1].append(Run(tensor, row, row * row_numel, numel, offset))
    return buckets


class BucketMemory:
    """The memory of buckets: of two, and of those that something still refers to.

    Args:
        nbytes: The bytes of a bucket.
        allocate: Returns new memory of so many bytes: 1-D, uint8.
    """

    def __init__(self, nbytes: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self._nbytes, self._allocate = nbytes, allocate
        self._buckets: list[torch.Tensor] = []
        self._has_warned = False

    def take(self) -> torch.Tensor:
        """Return memory that nothing refers to."""
        for memory in self._buckets:
            # Views hold the storage, and arrays of NumPy a view.
            if storage_use_count(storage_address(memory.untyped_storage())) <= NUM_OWN_TENSORS:
                # A view, which holds the storage until all pieces of the bucket have been yielded.
                return memory[:]
        # The pair is passed on to the next bucket while the last tensor of the one before is still in use.
        if len(self._buckets) == 2:
            # What refers to the older one keeps it alive from here on.
            del self._buckets[0]
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "stream_weights(): tensors of earlier buckets are still in use, so each bucket takes another %s. "
                    "Copy what is to be kept, and drop the tensors of a bucket before the second one after it.",
                    format_byte_size(self._nbytes),
                )
        self._buckets.append(self._allocate(self._nbytes))
        return self._buckets[-1][:]


class WeightStream:
    """An iterator over whole tensors of an engine. See `Engine.stream_weights`.

    Iterate it to its end on every rank. In a `with` an error of the consumer has its text on all ranks.

    Args:
        group: All ranks of the engine.
        gatherer: Refuses other calls of the engine until the stream ends.
        reads: Reads tensors.
        tensors: The attribute.
        buckets: What comes in each bucket.
        memory: The memory of buckets; None on a rank that gets no values.
        fill_stream: The CUDA stream that fills buckets; None on the CPU.
        token: What a consumer has that has taken this stream.

    Attributes:
        tensors: The shape and dtype of each tensor that the stream yields, by name and in order.
        has_ended: Whether nothing comes any more.
    """

    def __init__(
        self,
        group: Group,
        gatherer: Gatherer,
        reads: TensorReads,
        tensors: Mapping[str, TensorSpec],
        buckets: Sequence[Sequence[Run]],
        memory: BucketMemory | None,
        fill_stream: torch.cuda.Stream | None,
        token: WeightsToken | None,
    ) -> None:
        self._group, self._gatherer, self._reads = group, gatherer, reads
        self._fill_stream, self._token, self.tensors = fill_stream, token, tensors
        self._num_errors = group.num_errors
        # It must not refer to the stream, which ends when its consumer has dropped it.
        self._filled = _filled(group, reads, memory, buckets, fill_stream)
        # The bucket that pieces are yielded of, the rest of its runs, and one that was filled ahead.
        self._bucket: Bucket | None = None
        self._runs: deque[Run] = deque()
        self._ahead: Bucket | None = None
        self._last_name: str | None = None
        self.has_ended = self._is_complete = False
        # The gatherer must not keep a stream alive that its consumer has dropped.
        reference = weakref.ref(self)
        gatherer.refuse_calls = lambda call: _refuse(reference(), call)

    @property
    def token(self) -> WeightsToken:
        """What a consumer has that has taken this whole stream, for `since` of the next one.

        Raises:
            ZeroEngineError: The stream has not come to its end, or it was opened without `since`.
        """
        if self._token is None:
            raise ZeroEngineError(
                "a stream without since=... compares nothing and has no token. Begin with "
                "stream_weights(since=zeroengine.WeightsToken()), which yields all tensors."
            )
        if not self._is_complete:
            raise ZeroEngineError("the token of a stream exists when the stream has come to its end")
        return self._token

    def __iter__(self) -> WeightStream:
        """Return the stream."""
        return self

    def __next__(self) -> WeightPiece:
        """Return the next piece.

        Raises:
            ZeroEngineError: On every rank, where another rank has left the stream.
        """
        if self._bucket is not None and self._fill_stream is not None and len(self._runs) == len(self._bucket.runs) - 1:
            # By now the consumer has dropped the bucket before this one, so the next bucket can be filled meanwhile.
            self._ahead = self._next_filled()
        while not self._runs:
            self._bucket = self.next_bucket()
            if self._bucket is None:
                raise StopIteration
            self._runs.extend(self._bucket.runs)
        run = self._runs.popleft()
        assert self._bucket is not None
        self._last_name = run.tensor.name
        return self._bucket.piece(run)

    def next_bucket(self) -> Bucket | None:
        """Return the next bucket, in place of its pieces; None at the end, and where this rank gets no values.

        Raises:
            ZeroEngineError: As `__next__`.
        """
        bucket, self._ahead = self._ahead or self._next_filled(), None
        if bucket is not None:
            self._last_name = next((run.tensor.name for run in bucket.runs), None)
            self._wait_for_fills()
            if self._fill_stream is not None and not bucket.memory.is_cuda:
                self._fill_stream.synchronize()
        elif not self.has_ended:
            # No rank may change values before all ranks have read theirs.
            with self._ending_on_error(), self._group.collective_errors("to stream weights", call=CALL):
                self._reads.raise_error()
            self._end()
            self._is_complete = True
        return bucket

    def close(self, reason: str = "its consumer ended") -> None:
        """End the stream on all ranks, if it has not come to its end. The other ranks raise an error with `reason`."""
        if self.has_ended:
            return
        self._end()
        # An error that is raised inside such a block tells the others by itself.
        if self._group.is_collecting_errors or self.has_failed:
            return
        place = "before its first tensor" if self._last_name is None else f"at {self._last_name}"
        # The error concerns the other ranks.
        with contextlib.suppress(ZeroEngineError), self._group.collective_errors("to stream weights", call=CALL):
            raise ZeroEngineError(f"{reason} {place}")

    @property
    def has_failed(self) -> bool:
        """Whether all ranks have raised an error since the stream was opened, which has ended the stream on others."""
        return self._group.num_errors > self._num_errors

    def __enter__(self) -> WeightStream:
        """Return the stream."""
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """End the stream."""
        # A generator around the stream that its consumer drops gets a GeneratorExit.
        has_ended = error is None or isinstance(error, GeneratorExit)
        self.close() if has_ended else self.close(f"its consumer raised {type(error).__name__}: {error}")

    def __del__(self) -> None:
        """End the stream, which its consumer has dropped."""
        # The constructor may have raised, or the engine or the process has ended.
        if not getattr(self, "has_ended", True) and self._gatherer.refuse_calls and not sys.is_finalizing():
            self.close()

    # -- filling ----------------------------------------------------------------------------------

    def _next_filled(self) -> Bucket | None:
        """Return the next bucket with values for this rank, filled."""
        if self.has_failed:
            self.close()
        if self.has_ended:
            return None
        with self._ending_on_error():
            return next(self._filled, None)

    def _wait_for_fills(self) -> None:
        """Order what is issued next behind all reads of values."""
        if self._fill_stream is not None:
            torch.cuda.current_stream(self._group.device).wait_stream(self._fill_stream)

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}")
            raise

    def _end(self) -> None:
        self.has_ended = True
        self._gatherer.refuse_calls = None
        # The next step may write the values that are sent, or that a bucket is filled with ahead.
        self._wait_for_fills()
        self._reads.close()
        # The memory of buckets belongs to the consumer from here on.
        self._bucket = self._ahead = None
        self._runs.clear()
        self._filled.close()


def _filled(
    group: Group,
    reads: TensorReads,
    memory: BucketMemory | None,
    buckets: Iterable[Sequence[Run]],
    fill_stream: torch.cuda.Stream | None,
) -> Generator[Bucket]:
    """Yield each bucket that this rank gets values of, when it was filled. See `WeightStream`."""
    for runs in buckets:
        with group.collective_errors("to stream weights", call=CALL):
            reads.raise_error()
            bucket = None if memory is None else Bucket(memory.take(), runs)
        if fill_stream is not None:
            # What the consumer has issued may still read the memory that is filled.
            fill_stream.wait_stream(torch.cuda.current_stream(group.device))
        # The consumer computes with the last bucket meanwhile. Without a stream this changes nothing.
        with torch.cuda.stream(fill_stream):
            for run in runs:
                target = None if bucket is None else bucket.values(run)
                reads.read(target, run.tensor, run.start, run.start + run.numel)
        if bucket is not None and not reads.errors:
            yield bucket


def _refuse(stream: WeightStream | None, call: str) -> None:
    """Refuse a call of the engine during a stream, which ends."""
    if stream is None:
        return
    # After an error of all ranks they go on without the stream, which a variable may still refer to.
    has_failed = stream.has_failed
    stream.close(f"its consumer called {call}")
    if not has_failed:
        raise ZeroEngineError(
            f"{call} during a stream of the weights, which ends by it: take the whole stream before, or close() it"
        )
