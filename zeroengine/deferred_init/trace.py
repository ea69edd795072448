"""Records of how a tensor's values were computed, and their replay, which gives the same bits again.

[Note: Versions]
An operation that writes to a storage makes a new version of it. A version refers to its recorded operation and, unless
that overwrote everything, to the version before. A recorded operation refers to the versions that it read. So all that
a tensor's values depend on can be reached from its version. Run again in the old order, these operations give the same
bits: whatever else wrote to their storages in between was overwritten before any of them read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.utils.torch_internals import tree_leaves, tree_map


@dataclass(frozen=True, eq=False)
class TensorRef:
    """A tensor among the arguments of a recorded operation: a view of one version of a storage."""

    storage: int  # number of the storage
    nbytes: int  # of the storage
    device: torch.device
    version: StorageVersion | None  # None where the operation reads nothing of it and writes everything
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor, storage: int, nbytes: int, version: StorageVersion | None) -> TensorRef:
        """Return the reference to ``tensor``, whose storage has this number, bytes and version."""
        shape, stride = tuple(tensor.shape), tensor.stride()
        return cls(storage, nbytes, tensor.device, version, tensor.dtype, shape, stride, int(tensor.storage_offset()))

    @property
    def covers_storage(self) -> bool:
        """Whether the tensor is dense and covers all of its storage."""
        numel = 1
        # A dense tensor, in whatever order of its dimensions, has strides that are products of the smaller dimensions'
        # sizes.
        for size, stride in sorted(zip(self.shape, self.stride, strict=True), key=lambda dim: dim[1]):
            if size != 1 and stride != numel:
                return False
            numel *= size
        return not self.offset and numel * self.dtype.itemsize == self.nbytes

    def view_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of ``memory`` (1-D, uint8), which stands for its storage."""
        offset = memory.storage_offset() // self.dtype.itemsize + self.offset
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(memory.untyped_storage(), offset, self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class RecordedOp:
    """An operation that ran, with what it needs to run again."""

    number: int
    operation: Any
    args: tuple[Any, ...]  # a TensorRef in place of each recorded tensor, copies of other tensors
    kwargs: dict[str, Any]
    refs: tuple[TensorRef, ...]  # all that are in the arguments
    cost_bytes: int  # estimate of the memory that this record takes
    generator_state: tuple[torch.device, torch.Tensor] | None = None  # before it drew random numbers
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    # Index of the output, number of its new storage.
    new_storages: list[tuple[int, int]] = field(default_factory=list)

    def run(self, memory: Callable[[TensorRef], torch.Tensor]) -> list[torch.Tensor]:
        """Run the operation again and return its tensors. This changes generators and the default dtype.

        Args:
            memory: Returns the memory of a referenced storage (1-D, uint8).
        """
        # Operations such as ``torch.full`` with a float take their dtype from it.
        torch.set_default_dtype(self.default_dtype)

        def restore(leaf: Any) -> Any:
            if isinstance(leaf, TensorRef):
                return leaf.view_in(memory(leaf))
            if isinstance(leaf, torch.Generator):
                assert self.generator_state is not None
                # The user's generator must not move, so a new one draws the same numbers.
                generator = torch.Generator(leaf.device)
                generator.set_state(self.generator_state[1])
                return generator
            return leaf

        if self.generator_state is not None:
            default_generator(self.generator_state[0]).set_state(self.generator_state[1])
        args, kwargs = tree_map(restore, (self.args, self.kwargs))
        return tensors_of(self.operation(*args, **kwargs))


@dataclass(frozen=True, eq=False)
class StorageVersion:
    """The contents of a storage after an operation."""

    op: RecordedOp
    previous: StorageVersion | None  # None where this operation wrote everything
    cost_bytes: int  # upper bound on the bytes of all records that the version depends on

    @classmethod
    def after(cls, op: RecordedOp, previous: StorageVersion | None) -> StorageVersion:
        """Return the version that ``op`` makes of a storage. ``previous`` is None where it overwrites everything."""
        read = [ref.version for ref in op.refs if ref.version is not None and ref.version is not previous]
        return cls(
            op, previous, op.cost_bytes + sum(v.cost_bytes for v in read) + (previous.cost_bytes if previous else 0)
        )

    def with_exact_cost(self) -> StorageVersion:
        """Return this version with its true cost, which counts records that are needed in several places once."""
        return StorageVersion(self.op, self.previous, sum(op.cost_bytes for op in ops_of(self)))

    @property
    def is_uninitialized(self) -> bool:
        """Whether nothing has been written to the storage yet."""
        return self.op.operation in _UNINITIALIZED


_aten = torch.ops.aten
_UNINITIALIZED = {
    *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default),
    *(_aten.new_empty.default, _aten.new_empty_strided.default, _aten.empty_permuted.default),
}


class Trace:
    """The way to the values of a parameter that has no memory.

    Args:
        ref: The values. None: they will be loaded, and are zeros until then.
    """

    def __init__(self, ref: TensorRef | None) -> None:
        self._ref = ref

    @property
    def is_unset(self) -> bool:
        """Whether the values will be loaded."""
        return self._ref is None

    @property
    def device(self) -> torch.device:
        """The device of an ordinary build."""
        return torch.get_default_device() if self._ref is None else self._ref.device

    def write(self, target: torch.Tensor) -> torch.Tensor:
        """Compute the values into ``target``, of the same shape, and return them as they were before a cast."""
        ref = self._ref
        if ref is None:
            return target.zero_()
        assert ref.version is not None
        # Values of the same layout are computed in place, without a second copy of the parameter.
        fits = target.dtype is ref.dtype and target.device == ref.device and target.stride() == ref.stride
        if fits and ref.covers_storage:
            start = target.storage_offset() * target.element_size()
            replay(ref.version, ref.storage, storage_bytes(target.untyped_storage())[start : start + target.nbytes])
            return target
        values = ref.view_in(replay(ref.version, ref.storage))
        target.copy_(values)
        return values

    def __reduce__(self) -> Any:
        """Refuse to pickle the parameter."""
        raise ZeroEngineError(
            "a parameter that was built under zeroengine.meta_init() has no values to save yet: pass its model to "
            "zeroengine.initialize() first"
        )


def replay(version: StorageVersion, storage: int, into: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a version of a storage again and return its bytes. Leave generators and the default dtype unchanged.

    Args:
        storage: The number of the storage.
        into: Memory for the result (1-D, uint8).

    Returns:
        1-D, uint8: ``into`` if it was given.
    """
    ops = ops_of(version)
    # The last operation that uses each storage: after it the memory can be freed.
    last = {number: op.number for op in ops for number in _storages_of(op)}
    # Views of wider dtypes need aligned memory. Where `into` is not aligned for them the result is copied into it.
    if into is not None and any(
        ref.storage == storage and into.storage_offset() % ref.dtype.itemsize for op in ops for ref in op.refs
    ):
        return into.copy_(replay(version, storage))
    # ``into`` stands for the storage from the start. Other storages get memory when an operation refers to them.
    memory: dict[int, torch.Tensor] = {} if into is None else {storage: into}

    def memory_of(ref: TensorRef) -> torch.Tensor:
        if ref.storage not in memory:
            memory[ref.storage] = torch.empty(ref.nbytes, dtype=torch.uint8, device=ref.device)
        return memory[ref.storage]

    with (
        torch.no_grad(),
        _preserve_global_state({op.generator_state[0] for op in ops if op.generator_state is not None}),
    ):
        for op in ops:
            outputs = op.run(memory_of)
            for index, number in op.new_storages:
                # The operation allocated the storage itself, so its bytes are copied to where they are wanted.
                if number == storage and into is not None:
                    into.copy_(storage_bytes(outputs[index].untyped_storage()))
                elif number in last:
                    memory[number] = storage_bytes(outputs[index].untyped_storage())
            # A reference to the outputs would keep memory alive that is freed below.
            del outputs
            for number in _storages_of(op):
                if last[number] == op.number and number != storage:
                    memory.pop(number, None)
    return memory[storage]


def ops_of(version: StorageVersion) -> list[RecordedOp]:
    """Return the operations that ``version`` depends on, in the order in which they ran."""
    ops: dict[int, RecordedOp] = {}
    visited: set[int] = set()
    pending = [version]
    while pending:
        dependency = pending.pop()
        if id(dependency) in visited:
            continue
        visited.add(id(dependency))
        if dependency.previous is not None:
            pending.append(dependency.previous)
        # One operation may have made several storages, and so several versions refer to it.
        if dependency.op.number not in ops:
            ops[dependency.op.number] = dependency.op
            pending += [ref.version for ref in dependency.op.refs if ref.version is not None]
    return [ops[number] for number in sorted(ops)]


def _storages_of(op: RecordedOp) -> list[int]:
    return [ref.storage for ref in op.refs] + [number for _, number in op.new_storages]


@contextlib.contextmanager
def _preserve_global_state(devices: set[torch.device]) -> Iterator[None]:
    dtype = torch.get_default_dtype()
    states = {device: default_generator(device).get_state() for device in devices}
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        for device, state in states.items():
            default_generator(device).set_state(state)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operations on ``device`` draw from by default."""
    if device.type == "cuda":
        # The generators of GPUs exist only after CUDA was initialized.
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all of a storage as a tensor (1-D, uint8)."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments or results of an operation."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
