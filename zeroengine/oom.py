"""Out of memory: what of it zeroengine holds, and what would make it less."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from .engine import Engine

F = TypeVar("F", bound=Callable[..., Any])


def explaining_memory(method: F) -> F:
    """A method of an engine whose ``torch.OutOfMemoryError`` says what the engine holds."""

    @functools.wraps(method)
    def run(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(engine, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            _explain(error, engine)
            raise

    return run  # type: ignore[return-value]


def _explain(error: torch.OutOfMemoryError, engine: Engine) -> None:
    stage, world_size = engine.config.zero_optimization.stage, engine.world_size
    ways = [f'"zero_optimization": {{"stage": {stage + 1}}}'] if stage < 3 and world_size > 1 else []
    if engine.config.low_precision is None:
        ways.append('"bf16": {"enabled": true}')
    ways += ["a smaller micro-batch with more gradient_accumulation_steps", "activation checkpointing"]
    error.args = (
        f"{error}\n\nzeroengine holds, {engine.memory()}\n\nThe rest are activations, temporaries and what else runs "
        f"there. What takes less: {', or '.join(ways)}.",
    )
