"""What turns the tensors of a model into those of another layout: names, and tensors that are computed from others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from zeroengine.partition.boxes import Box
from zeroengine.weights.huggingface_format import TensorSpec

# A tensor's values, and the box of the tensor that they are.
BoxValues = tuple[Box, torch.Tensor]


class TensorConversion(Protocol):
    """Tensors that are computed from other tensors, all at once or in parts.

    Attributes:
        sources: The names of all tensors that are taken.
        targets: The tensors that are computed.
        num_parts: The number of parts.
        settings: What the results depend on besides the values of the sources.
    """

    sources: list[str]
    targets: dict[str, TensorSpec]
    num_parts: int

    @property
    def settings(self) -> str:
        """See above."""

    def boxes(self, part: int) -> list[tuple[str, Box]]:
        """Return what a part is computed from: boxes of tensors by name, in the order that `convert` takes values."""

    def convert(self, part: int, values: Iterable[torch.Tensor]) -> dict[str, BoxValues]:
        """Return a part, as values of boxes of the tensors in `targets`."""

    def parts_of(self, target: str, box: Box) -> range:
        """Return the parts that hold elements of a box of a target."""


@dataclass(frozen=True)
class ConversionPlan:
    """Where each tensor of the new layout comes from.

    Attributes:
        old_names: The old name of a tensor that gets another name at most, by its new name.
        groups: The tensors that are computed from others.
        rename: Returns the new name of a tensor that no group computes.
        aliases: The name of a tensor that a group computes, by its further names.
    """

    old_names: dict[str, str]
    groups: Sequence[TensorConversion]
    rename: Callable[[str], str]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def new_specs(self, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Return the shapes and dtypes of the new layout, from those of the old one."""
        renamed = {name: specs[old_name] for name, old_name in self.old_names.items()}
        return renamed | {name: spec for group in self.groups for name, spec in group.targets.items()}
