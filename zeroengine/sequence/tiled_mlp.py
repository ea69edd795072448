"""A module that looks at one token at a time, in pieces of the sequence.

Each piece is a checkpoint: backward runs it again, so the activations of one piece exist at a time. Autograd adds the
gradients that a parameter has from the pieces before it calls the hooks of the parameter, so the pieces are one use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from zeroengine.errors import ZeroEngineError


def tiled_mlp(
    module: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, *, num_tiles: int | None = None
) -> torch.Tensor:
    """Return ``module(hidden)``, with the activations of a part of the sequence at a time.

    Args:
        module: Takes and returns a tensor, each of whose tokens depends on this token alone, such as an MLP.
        hidden: Of shape (..., tokens, width).
        num_tiles: The parts that the tokens are divided into. None: the tokens over the width, rounded up.

    Raises:
        ZeroEngineError: The module returns anything but a tensor with the same tokens.
    """
    tiles = hidden.chunk(num_tiles or max(1, -(-hidden.shape[-2] // hidden.shape[-1])), -2)
    is_needed = len(tiles) > 1 and torch.is_grad_enabled()
    outputs = run_tiles(partial(checkpoint, module, use_reentrant=False) if is_needed else module, tiles)
    shapes = [getattr(output, "shape", type(output).__name__) for output in outputs]
    if any(shape[:-1] != tile.shape[:-1] for shape, tile in zip(shapes, tiles, strict=True)):
        raise ZeroEngineError(
            f"tiled_mlp(): a module returns one tensor with the tokens of {hidden.shape}; found {shapes}"
        )
    return torch.cat(outputs, -2)


def run_tiles(run: Callable[[torch.Tensor], torch.Tensor], tiles: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of all tiles. A plan replaces this function."""
    return list(map(run, tiles))
