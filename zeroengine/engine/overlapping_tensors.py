"""Find parameters and buffers that share memory without being one tensor, before a model is partitioned.

[Note: Tensors that share memory]
``head.weight.data = embedding.weight.data`` ties two parameters by their memory alone. Units copy parameters, so the
two would be separated, and each would be trained by itself. Therefore ``initialize``

- makes one tensor of those that cover the same elements in the same order: both modules get the first of them, as with
  ``head.weight = embedding.weight``. The other object raises at every use until the engine ends, and then it shares the
  memory of the first one again;
- refuses what overlaps otherwise. Slices of one storage without common elements, such as the flat weights of an LSTM,
  are ordinary parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroengine.deferred_init.parameter import swap_data, take_trace
from zeroengine.errors import ReleasedParameterError, ZeroEngineError
from zeroengine.runtime.released_parameter import is_released_parameter, mark_gathered, mark_released
from zeroengine.utils.listed import listed

# The number of pairs that a message names.
NUM_SHOWN = 3


@dataclass(frozen=True)
class _Region:
    """The memory of one parameter or buffer. Tensors on the meta device have addresses within their storage alone.

    Attributes:
        name: The tensor's name in the model.
        tensor: The tensor.
        space: What addresses count in: a device, or a storage on the meta device.
        start: The address of the first byte.
        stop: The address behind the last byte.
    """

    name: str
    tensor: torch.Tensor
    space: object
    start: int
    stop: int

    @property
    def key(self) -> tuple[object, ...]:
        """What two tensors have in common that have the same elements in the same order."""
        tensor = self.tensor
        # A dimension of size 1 has a stride without a meaning.
        strides = tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
        return self.space, self.start, tuple(tensor.shape), strides, tensor.dtype, self.is_parameter

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, and not a buffer."""
        return isinstance(self.tensor, nn.Parameter)

    def __str__(self) -> str:
        return f"{'parameter' if self.is_parameter else 'buffer'} {self.name}"


def tie_same_tensors(model: nn.Module, undo: ExitStack) -> tuple[dict[torch.Tensor, torch.Tensor], str | None]:
    """Make one tensor of parameters, or of buffers, that cover the same memory. See the note above.

    Args:
        model: The model, whose modules get the first of several tensors.
        undo: Gives the modules back what they had, with the values of that time.

    Returns:
        For each tensor that left the model, the one in its place; and a notice of what was tied.

    Raises:
        ZeroEngineError: Tensors overlap in part, or elements of a trainable parameter overlap one another, or tensors
            that are to be one differ in whether they require gradients, or have hooks. Nothing has changed.
    """
    regions = list(_regions(model))
    groups: dict[tuple[object, ...], list[_Region]] = {}
    for region in regions:
        _check_inner_overlap(region)
        groups.setdefault(region.key, []).append(region)
    _check_overlaps([group[0] for group in groups.values()])
    pairs = [(group[0], other) for group in groups.values() for other in group[1:]]
    for first, other in pairs:
        _check_can_be_one(first, other)
    if not pairs:
        return {}, None
    replacements: dict[torch.Tensor, torch.Tensor] = {other.tensor: first.tensor for first, other in pairs}
    for module in list(model.modules()):
        for members in (module._parameters, module._buffers):
            for key, tensor in list(members.items()):
                if tensor in replacements:
                    # ``setattr`` lets a module such as an LSTM update its own list of weights.
                    setattr(module, key, replacements[tensor])
                    undo.callback(_separate, module, key, tensor)
    for first, other in pairs:
        if first.is_parameter:
            _retire(first, other)
    notice = listed([f"{other} is {first.name} now" for first, other in pairs], NUM_SHOWN)
    return replacements, f"tensors that share their memory are one tensor from now on, as tied weights are: {notice}"


def replace_tied(
    optimizer: torch.optim.Optimizer,
    tied: Mapping[torch.Tensor, torch.Tensor],
    names: Mapping[Any, str],
    undo: ExitStack,
) -> None:
    """Let the groups of ``optimizer`` hold each parameter once, where several were tied.

    Args:
        optimizer: The caller's optimizer.
        tied: For each parameter that left the model, the one in its place.
        names: The names of the model's parameters.
        undo: Gives the groups their parameters back.

    Raises:
        ZeroEngineError: The two are in groups with different hyperparameters. Nothing has changed.
    """
    if not tied:
        return
    groups = optimizer.param_groups
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    index_of: dict[torch.Tensor, int] = {}
    replaced: list[list[torch.Tensor]] = []
    for index, group in enumerate(groups):
        params: list[torch.Tensor] = []
        for param in group["params"]:
            param = tied.get(param, param)
            earlier = index_of.setdefault(param, index)
            if earlier != index and settings[earlier] != settings[index]:
                raise ZeroEngineError(
                    f"parameters that share the memory of {names.get(param)} are in param_groups[{earlier}] and "
                    f"[{index}], whose hyperparameters differ. They are one parameter: put them into one group."
                )
            if not any(param is other for other in params) and earlier == index:
                params.append(param)
        replaced.append(params)
    for group, params in zip(groups, replaced, strict=True):
        undo.callback(group.__setitem__, "params", group["params"])
        group["params"] = params


def _regions(model: nn.Module) -> Iterator[_Region]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.numel():
            continue
        spread = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        # A tensor without memory has no address.
        space = ("meta", tensor.untyped_storage()._cdata) if tensor.is_meta else tensor.device
        start = tensor.storage_offset() * tensor.element_size() if tensor.is_meta else tensor.data_ptr()
        yield _Region(name, tensor, space, int(start), int(start + (spread + 1) * tensor.element_size()))


def _check_inner_overlap(region: _Region) -> None:
    """Raise ``ZeroEngineError`` if elements of a trainable parameter surely or possibly share memory."""
    if not region.tensor.requires_grad:
        # torch allows no in-place write to such a tensor, so a copy of all elements is the same.
        return
    reach = 0
    for stride, size in sorted(zip(region.tensor.stride(), region.tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ZeroEngineError(
                f"{region} of shape {tuple(region.tensor.shape)} has strides {region.tensor.stride()}: some of its "
                "elements are in one place of memory, as after expand(), and no optimizer could update them. Write "
                "`.clone()` or `.contiguous()` to give each element memory of its own, or keep the small tensor as the "
                "parameter and expand it in the forward."
            )
        reach += (size - 1) * stride


def _check_overlaps(regions: Sequence[_Region]) -> None:
    """Raise ``ZeroEngineError`` if two of ``regions``, none of which are the same, have common bytes."""
    spaces: dict[object, list[_Region]] = {}
    for region in regions:
        spaces.setdefault(region.space, []).append(region)
    overlapping: list[tuple[_Region, _Region]] = []
    for members in spaces.values():
        cluster: list[_Region] = []
        stop = 0
        # Most tensors have memory of their own, so each of these clusters is one tensor.
        for region in sorted(members, key=lambda region: region.start):
            if region.start >= stop:
                overlapping += _overlaps_in(cluster)
                cluster = []
            cluster.append(region)
            stop = max(stop, region.stop)
        overlapping += _overlaps_in(cluster)
    if overlapping:
        pairs = [f"{first} with {second}" for first, second in overlapping]
        raise ZeroEngineError(
            f"tensors of the model share a part of their memory: {listed(pairs, NUM_SHOWN)}. Partitioning would "
            "separate them. Keep one of them and compute the other from it in the forward, such as a slice or a "
            "transpose (`F.linear(x, self.weight.t())`); or give it memory of its own by `.clone()`, if the two are to "
            "differ. Parameters of the same shape are tied by `head.weight = embedding.weight`."
        )


def _overlaps_in(cluster: Sequence[_Region]) -> Iterator[tuple[_Region, _Region]]:
    """Yield pairs with common bytes, among regions between whose first and last bytes the others begin."""
    if len(cluster) < 2:
        return
    # Regions may be interlaced, such as columns of one matrix. So the bytes of each are marked in a map of all.
    base, stop = cluster[0].start, max(region.stop for region in cluster)
    unit = math.gcd(*(region.start - base for region in cluster), *(r.tensor.element_size() for r in cluster))
    owners = torch.full(((stop - base) // unit,), -1, dtype=torch.int32, device="cpu")
    for index, region in enumerate(cluster):
        step = region.tensor.element_size() // unit
        strides = [stride * step for stride in region.tensor.stride()]
        # A frozen tensor may be expanded, and torch refuses to write to such a view.
        sizes = [size if stride else 1 for size, stride in zip(region.tensor.shape, strides, strict=True)]
        places = owners.as_strided([*sizes, step], [*strides, 1], (region.start - base) // unit)
        yield from ((cluster[other], region) for other in places.unique().tolist() if other >= 0)
        places.fill_(index)


def _check_can_be_one(first: _Region, other: _Region) -> None:
    if first.tensor.requires_grad != other.tensor.requires_grad:
        raise ZeroEngineError(
            f"{first} and {other} are the same memory, and one of them is frozen: they would be one parameter, which "
            "is trained or not. Freeze both, or train both, or give one memory of its own by `.clone()`."
        )
    if other.tensor._backward_hooks or getattr(other.tensor, "_post_accumulate_grad_hooks", None):
        raise ZeroEngineError(
            f"{first} and {other} are the same memory and become one tensor, and hooks are registered on {other.name}: "
            f"tie them before, by assigning the tensor of {first.name} to the other module, and register hooks on that."
        )


def _retire(first: _Region, other: _Region) -> None:
    """Free the memory of a parameter that left the model, and let each use of it raise."""

    def refuse(param: nn.Parameter, operation: str) -> None:
        raise ReleasedParameterError(
            f"`{operation}` of the parameter that was {other.name}: it had the memory of {first.name}, and the model "
            f"holds that one in its place since initialize(). Use the parameter {first.name}."
        )

    param: Any = other.tensor
    param.grad = None
    value = torch.full((), float("nan") if param.is_floating_point() else 0, dtype=param.dtype, device=param.device)
    param.data = value.expand(param.shape)
    mark_released(param, refuse)


def _separate(module: nn.Module, key: str, tensor: torch.Tensor) -> None:
    """Let a module have its own tensor again, which shares the memory of the tensor that took its place."""
    present = getattr(module, key, None)
    # The user may have put something else there since, and after an error parameters may have no values.
    if not isinstance(present, torch.Tensor) or present.shape != tensor.shape or is_released_parameter(present):
        return
    if isinstance(tensor, nn.Parameter):
        mark_gathered(tensor)
    if isinstance(tensor, nn.Parameter) and tensor.is_meta and not present.is_meta:
        # The parameter was built under ``meta_init``, and refuses ``data`` of another device.
        take_trace(tensor)
        swap_data(tensor, present.data)
    else:
        tensor.data = present.data
    setattr(module, key, tensor)
