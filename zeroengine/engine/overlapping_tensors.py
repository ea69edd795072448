"""Refuse parameters and buffers that share memory without being one tensor, before a model is partitioned.

[Note: Tensors that share memory]
``head.weight.data = embedding.weight.data`` ties two parameters by their memory alone. Units copy parameters, so the
two would be separated, and each would be trained by itself. Nor would one slot for both give the numbers of plain
PyTorch: an optimizer has a gradient and moments for each of the two, and writes the common memory twice a step. Slices
of one storage without common elements, such as the flat weights of an LSTM, are ordinary parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.utils.formats import listed
from zeroengine.utils.torch_internals import is_traceable_wrapper_subclass, storage_address

# The number of pairs that a message names.
NUM_SHOWN = 3
ADVICE = (
    "Tie two of one shape by one tensor for both modules (`head.weight = embedding.weight`), which "
    "load_state_dict(assign=True) undoes. Of others keep one and compute the other from it in the forward, such as a "
    "slice or a transpose (`F.linear(x, self.weight.t())`); or give it memory of its own by `.clone()`, if the two are "
    "to differ."
)
ADVICE_FOR_PEFT = (
    'These are adapters that peft ties by a transpose. Call compute_transposes() of "Adapters that peft ties" in '
    "docs/training.md before the optimizer is made: it computes one from the other. Or write "
    "ensure_weight_tying=False, with which the embedding and the head have adapters of their own."
)


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

    def __str__(self) -> str:
        return f"{'parameter' if isinstance(self.tensor, nn.Parameter) else 'buffer'} {self.name}"


def check_overlaps(model: nn.Module) -> None:
    """Check that each element of each parameter and buffer has memory of its own. See the note above.

    Raises:
        ZeroEngineError: Two tensors have common bytes, or elements of a trainable parameter surely or possibly share
            memory. The message names them.
    """
    spaces: dict[object, list[_Region]] = {}
    for region in _regions(model):
        _check_inner_overlap(region)
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
        of_peft = any("lora_embedding_" in region.name for pair in overlapping for region in pair)
        raise ZeroEngineError(
            f"tensors of the model share memory: {listed(pairs, NUM_SHOWN)}. Partitioning would separate them. "
            f"{ADVICE_FOR_PEFT if of_peft else ADVICE}"
        )


def _regions(model: nn.Module) -> Iterator[_Region]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        # A wrapper of other tensors has no address.
        if not tensor.numel() or is_traceable_wrapper_subclass(tensor):
            continue
        spread = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        # A tensor without memory has no address.
        space = ("meta", storage_address(tensor.untyped_storage())) if tensor.is_meta else tensor.device
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
