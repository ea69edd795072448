"""How a tensor's values came about, and the same bits again.

[Note: Versions]
An operation that writes to a storage makes a version of it. A version knows its step (the operation with its arguments)
and, unless the step overwrote everything, the version before; a step knows the versions that it read. So what a tensor
needs can be reached from its version. Run again in the old order these steps give the same bits: whatever else wrote to
their storages in between was overwritten before any of them read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zeroengine.errors import ZeroEngineError


@dataclass(frozen=True, eq=False)
class Ref:
    """A tensor among the arguments of a step: a view of a version of a storage."""

    storage: int  # its number
    nbytes: int  # of the storage
    device: torch.device
    version: Version | None  # None: nothing of it is read, and everything is written
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements

    @classmethod
    def to(cls, tensor: torch.Tensor, storage: int, nbytes: int, version: Version | None) -> Ref:
        shape, stride = tuple(tensor.shape), tensor.stride()
        return cls(storage, nbytes, tensor.device, version, tensor.dtype, shape, stride, int(tensor.storage_offset()))

    @property
    def whole(self) -> bool:
        """Whether it is all of its storage."""
        numel = 1
        for size, stride in sorted(zip(self.shape, self.stride, strict=True), key=lambda dim: dim[1]):
            if size != 1 and stride != numel:
                return False
            numel *= size
        return not self.offset and numel * self.dtype.itemsize == self.nbytes

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, where ``memory`` (of bytes) is its storage."""
        offset = memory.storage_offset() // self.dtype.itemsize + self.offset
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(memory.untyped_storage(), offset, self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class Step:
    """An operation that ran, with what it needs to run again."""

    number: int
    operation: Any
    args: tuple[Any, ...]  # with a Ref for each tensor that steps made, and copies of others
    kwargs: dict[str, Any]
    refs: tuple[Ref, ...]  # those within
    default_dtype: torch.dtype
    random: tuple[torch.device, torch.Tensor] | None  # the state of the generator that it drew from
    nbytes: int  # that it takes, about
    made: list[tuple[int, int]]  # new storages: which of its outputs, and their numbers

    def run(self, memory: Callable[[Ref], torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that it returns. Leaves generators and the default dtype behind as it takes them."""
        torch.set_default_dtype(self.default_dtype)

        def given(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return leaf.within(memory(leaf))
            if isinstance(leaf, torch.Generator):
                assert self.random is not None
                generator = torch.Generator(leaf.device)
                generator.set_state(self.random[1])
                return generator
            return leaf

        if self.random is not None:
            default_generator(self.random[0]).set_state(self.random[1])
        return tensors_of(self.operation(*mapped(given, self.args), **mapped(given, self.kwargs)))


@dataclass(frozen=True, eq=False)
class Version:
    """What a storage held after a step."""

    step: Step
    previous: Version | None  # None: all that it holds is of this step
    nbytes: int  # of what it takes to make it again, at most

    @classmethod
    def after(cls, step: Step, previous: Version | None) -> Version:
        read = [ref.version for ref in step.refs if ref.version is not None and ref.version is not previous]
        return cls(step, previous, step.nbytes + sum(v.nbytes for v in read) + (previous.nbytes if previous else 0))

    def exact(self) -> Version:
        """With ``nbytes`` as it is: steps that are needed in several places are there once."""
        return Version(self.step, self.previous, sum(step.nbytes for step in steps_of(self)))

    @property
    def blank(self) -> bool:
        """Whether it is memory that nobody has written to."""
        return self.step.operation in _BLANK


_aten = torch.ops.aten
_BLANK = {
    *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default),
    *(_aten.new_empty.default, _aten.new_empty_strided.default, _aten.empty_permuted.default),
}


class Trace:
    """The values of a parameter that has no memory."""

    def __init__(self, ref: Ref) -> None:
        self._ref = ref

    def write(self, target: torch.Tensor) -> None:
        """Puts the values into ``target``, of the same shape."""
        ref = self._ref
        assert ref.version is not None
        fits = target.dtype is ref.dtype and target.device == ref.device and target.stride() == ref.stride
        if fits and ref.whole:
            replay(ref.version, ref.storage, _part_of(target))
        else:
            target.copy_(ref.within(replay(ref.version, ref.storage)))

    def __reduce__(self) -> Any:
        raise ZeroEngineError(
            "a parameter that was built under zeroengine.meta_init() has no values to save yet: pass its model to "
            "zeroengine.initialize() first"
        )


class UnsetTrace(Trace):
    """In place of a trace: no values, for others will be loaded. They are zeros until then."""

    def __init__(self) -> None: ...

    def write(self, target: torch.Tensor) -> None:
        target.zero_()


def replay(version: Version, storage: int, into: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of a version of a storage.

    Generators and the default dtype are afterwards as before.

    Args:
        storage: its number.
        into: memory for it, 1-D bytes. What steps do with views of other dtypes may need memory of its own first.
    """
    steps = steps_of(version)
    last = {number: step.number for step in steps for number in _used(step)}
    if into is not None and any(
        ref.storage == storage and into.storage_offset() % ref.dtype.itemsize for step in steps for ref in step.refs
    ):
        return into.copy_(replay(version, storage))
    memory: dict[int, torch.Tensor] = {} if into is None else {storage: into}

    def memory_of(ref: Ref) -> torch.Tensor:
        if ref.storage not in memory:
            memory[ref.storage] = torch.empty(ref.nbytes, dtype=torch.uint8, device=ref.device)
        return memory[ref.storage]

    with torch.no_grad(), _as_before({step.random[0] for step in steps if step.random is not None}):
        for step in steps:
            outputs = step.run(memory_of)
            for index, number in step.made:
                if number == storage and into is not None:
                    into.copy_(storage_of(outputs[index]))
                elif number in last:
                    memory[number] = storage_of(outputs[index])
            del outputs
            for number in _used(step):
                if last[number] == step.number and number != storage:
                    memory.pop(number, None)
    return memory[storage]


def steps_of(version: Version) -> list[Step]:
    """All that it takes to make ``version``, in order."""
    found: dict[int, Step] = {}
    seen: set[int] = set()
    waiting = [version]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if each.previous is not None:
            waiting.append(each.previous)
        if each.step.number not in found:
            found[each.step.number] = each.step
            waiting += [ref.version for ref in each.step.refs if ref.version is not None]
    return [found[number] for number in sorted(found)]


def _used(step: Step) -> list[int]:
    return [ref.storage for ref in step.refs] + [number for _, number in step.made]


@contextlib.contextmanager
def _as_before(devices: set[torch.device]) -> Iterator[None]:
    dtype = torch.get_default_dtype()
    states = {device: default_generator(device).get_state() for device in devices}
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        for device, state in states.items():
            default_generator(device).set_state(state)


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage, as bytes, 1-D."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _part_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's part of its storage, as bytes, 1-D."""
    start = tensor.storage_offset() * tensor.element_size()
    return storage_of(tensor)[start : start + tensor.nbytes]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` (an operation's arguments) with every leaf replaced."""
    if isinstance(tree, (tuple, list)):
        return type(tree)([mapped(function, item) for item in tree])
    if isinstance(tree, dict):
        return {key: mapped(function, value) for key, value in tree.items()}
    return function(tree)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors among an operation's arguments or results."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [tensor for item in items for tensor in tensors_of(item)]
