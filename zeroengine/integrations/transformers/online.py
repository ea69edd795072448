"""What TRL's online trainers read the weights for vLLM from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zeroengine.engine.engine import Engine


class StreamedModel(nn.Module):
    """Stands for the model of TRL's `VLLMGeneration`: its parameters come out of a stream, adapters merged.

    It is a module, since accelerate asks a model for its modules.

    Args:
        generation: The `VLLMGeneration`. In server mode rank 0 alone sends weights, otherwise every rank loads them.
        has_adapters: Whether the model is one of peft.
        require_engine: Returns the engine of the model.
    """

    def __init__(self, generation: Any, has_adapters: bool, require_engine: Callable[[], Engine]) -> None:
        super().__init__()
        self._generation, self._has_adapters, self._require_engine = generation, has_adapters, require_engine

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield whole tensors under the names that vLLM loads. Call it on every rank, and take all of them.

        Each has memory of its own, since vLLM packs more of them than a bucket holds and knows no pieces of rows.
        """
        is_server = self._generation.mode == "server"
        stream = self._require_engine().stream_weights(
            ranks=0 if is_server else "all", merge="peft" if self._has_adapters else None, layout="files"
        )
        with stream:
            # The server is first told what comes, which takes no values.
            if is_server and self._generation._weight_metadata is None:
                for name, spec in stream.tensors.items():
                    yield name, torch.empty(spec.shape, dtype=spec.dtype, device="meta")
                return
            tensor = torch.empty(0)
            for piece in stream:
                if piece.row == 0:
                    tensor = piece.values.new_empty(piece.shape)
                rows = tensor[piece.row : piece.row + len(piece.values)] if piece.shape else tensor
                rows.copy_(piece.values)
                if piece.is_whole or piece.row + len(piece.values) == piece.shape[0]:
                    yield piece.name, tensor
