"""Tensors in nested structures, over parts of the memory of others, and small ones on their way to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

_address_of = methodcaller("data_ptr")

# -- nested structures -------------------------------------------------------------------------------


def leaves_in(tree: Any) -> Iterator[Any]:
    """Yield every object in nested tuples, lists, mappings and dataclasses that is not one of these itself."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves_in(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from leaves_in(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from leaves_in(getattr(tree, field.name))
    else:
        yield tree


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested tuples, lists, mappings and dataclasses."""
    return (leaf for leaf in leaves_in(tree) if isinstance(leaf, torch.Tensor))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return ``tree`` with ``function`` applied to each tensor.

    Containers keep their type. A container in which nothing changes is returned itself, so that a module can still fill
    a list or dict of its caller. The batch sizes of a ``PackedSequence``, which torch needs on the CPU, do not change.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, MutableMapping):
        items = {key: map_tensors(function, value) for key, value in tree.items()}
        # Modules may write into their argument, so an unchanged one must be the same object.
        if all(items[key] is value for key, value in tree.items()):
            return tree
        # torch.compile cannot trace copy.copy, so the most common case avoids it.
        if type(tree) is dict:
            return items
        mapped: Any = copy.copy(tree)
        # transformers' ModelOutput forbids `update`.
        for key, value in items.items():
            mapped[key] = value
        return mapped
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        values = map_tensors(function, fields)
        if values is fields:
            return tree
        mapped = copy.copy(tree)
        # `dataclasses.replace` would call the constructor, which may compute fields.
        for name, value in values.items():
            object.__setattr__(mapped, name, value)
        return mapped
    if isinstance(tree, PackedSequence):
        data, batch_sizes, *indices = tree
        parts = [map_tensors(function, data), batch_sizes, *map_tensors(function, indices)]
    elif isinstance(tree, (tuple, list)):
        parts = [map_tensors(function, value) for value in tree]
    else:
        return tree
    if all(new is old for new, old in zip(parts, tree, strict=True)):
        return tree
    # The constructor of a named tuple takes its fields, that of other sequences takes one iterable.
    return type(tree)(*parts) if isinstance(tree, tuple) and hasattr(tree, "_fields") else type(tree)(parts)


# -- storages ----------------------------------------------------------------------------------------


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory, whose storage is that memory alone.

    The memory stays for as long as either tensor lives. Writes to one are seen in the other, and count in the version
    of neither but the one that was written to.

    Args:
        tensor: Contiguous.
    """
    # DLPack does not support all dtypes, so bytes are passed. Other devices than these two may not support it.
    if tensor.device.type not in ("cpu", "cuda") or not tensor.numel():
        return tensor
    return torch.from_dlpack(tensor.view(-1).view(torch.uint8)).view(tensor.dtype).view(tensor.shape)


class Addresses:
    """Tells whether tensors that stay the same objects have got other memory.

    Args:
        tensors: The tensors.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._known: list[int] = []

    def have_changed(self) -> bool:
        """Return whether any address is another one than at the last call; at the first call, whether there are any."""
        # With ``map``, a ``methodcaller`` reads thousands of addresses at each step without a Python frame for each.
        before, self._known = self._known, list(map(_address_of, self._tensors))
        return self._known != before


# -- transfers ---------------------------------------------------------------------------------------


class HostCopy:
    """The values of a small tensor at this point of the current stream, for the host to read later.

    On CUDA they are copied into pinned memory. On the CPU nothing is copied.

    Args:
        values: A tensor that must not be written afterwards.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            # A copy into ordinary memory would make the host wait for the stream, so the target is pinned.
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            # Reading waits for this event, and not for kernels that were issued after the copy.
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[Any]:
        """Return the values in nested lists. Wait for the copy, and for nothing that was issued after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a 1-D tensor on ``device``, without waiting for the device.

    The source is pinned memory, which torch keeps until the copy is done.
    """
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )
