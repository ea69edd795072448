"""The section of tiles: work on a part of the tokens at a time."""

from __future__ import annotations

from zeroengine.config.fields import Section


class Tiling(Section):
    """Parts of models of transformers that compute some tokens at a time. Other models call `zeroengine.tiled_loss` and
    `zeroengine.tiled_mlp` themselves."""

    loss: bool = False
    """Compute the loss of a causal language model in training without the logits of all tokens."""
    mlp: bool = False
    """Run the MLP of each layer on parts of the sequence, and again in backward."""
