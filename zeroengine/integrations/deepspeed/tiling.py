"""``deepspeed.zero.TiledLinear``: a linear layer made of smaller ones, which are gathered one after another."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zeroengine.engine.gathered import gathered
from zeroengine.errors import ZeroEngineError


class TilingError(ZeroEngineError, RuntimeError):
    """A layer cannot be cut in this way. DeepSpeed raises RuntimeError, which scripts catch."""


class TiledLinear(nn.Module):
    """A linear layer, cut into ``out_splits`` rows of ``in_splits`` tiles.

    Args:
        in_features: As of ``torch.nn.Linear``.
        out_features: As of ``torch.nn.Linear``.
        bias: Whether there is a bias. The last tile of each row has it.
        in_splits: The tiles of a row.
        out_splits: The rows.
        input_is_already_split: Whether ``forward`` takes a list of ``in_splits`` tensors.
        combine_out_splits: Whether ``forward`` returns one tensor, and not a list of one for each row.
        linear_cls: The class of a tile.
        init_linear: A layer of the whole size whose values are copied.
        options: Further arguments of ``linear_cls``.

    Attributes:
        in_parts: Where the tiles of a row begin, and where the last one ends. Integers.
        out_parts: The same of the rows.
        linears: The rows of tiles.

    Raises:
        TilingError: A number of splits is below 1, or larger than the dimension that is cut.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = _parts("in_splits", in_features, in_splits)
        self.out_parts = _parts("out_splits", out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(num_inputs, num_outputs, bias=bias and column == in_splits - 1, **options)
                for column, num_inputs in enumerate(_sizes(self.in_parts))
            )
            for num_outputs in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, inputs: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Return the whole output, or the output of each row."""
        rows = [functools.reduce(operator.add, outputs) for outputs in self._outputs_of_tiles(inputs)]
        return torch.cat(rows, dim=-1) if self.combine_out_splits else rows

    def _outputs_of_tiles(self, inputs: Any) -> list[list[Any]]:
        """Return what the tiles of each row return for their parts of the input."""
        if not self.input_is_already_split:
            inputs = inputs.split(_sizes(self.in_parts), dim=-1)
        return [[tile(column) for tile, column in zip(tiles, inputs, strict=True)] for tiles in self.linears]  # type: ignore[call-overload]

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take the values of a layer of the whole size. A collective where either of the two is partitioned."""
        with gathered(other), gathered(self):
            tiles: Any
            for tiles, rows in zip(self.linears, other.weight.split(_sizes(self.out_parts)), strict=True):
                for tile, values in zip(tiles, rows.split(_sizes(self.in_parts), dim=1), strict=True):
                    tile.weight.copy_(values)
            if self.use_bias:
                for tiles, values in zip(self.linears, other.bias.split(_sizes(self.out_parts)), strict=True):
                    tiles[-1].bias.copy_(values)


class TiledLinearReturnBias(TiledLinear):
    """A ``TiledLinear`` of tiles that return their output and their bias, which is not added. See there."""

    def forward(self, inputs: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Return the output and the bias (None without one); of each row, unless they are combined."""
        rows = self._outputs_of_tiles(inputs)
        outputs = [functools.reduce(operator.add, (output for output, _ in row)) for row in rows]
        biases = [row[-1][1] for row in rows]
        if not self.combine_out_splits:
            return outputs, biases
        return torch.cat(outputs, dim=-1), None if biases[0] is None else torch.cat(biases, dim=-1)


def _sizes(parts: Sequence[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(parts)]


def _parts(name: str, size: int, splits: int) -> list[int]:
    """Return the boundaries of ``splits`` parts of ``size`` elements, whose lengths differ by at most one."""
    if not 1 <= splits <= size:
        raise TilingError(f"TiledLinear({name}={splits}): write a number from 1 to {size}, the size of that dimension")
    return [size * part // splits for part in range(splits + 1)]
