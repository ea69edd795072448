"""Out of memory: what of it zeroengine holds, and what would make it less."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from zeroengine.engine.engine import Engine

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
    zero, world_size = engine.config.zero_optimization, engine.world_size
    stage, at_cpu = zero.stage, engine.device.type == "cpu"
    ways = [f'"zero_optimization": {{"stage": {stage + 1}}}'] if stage < 3 and world_size > 1 else []
    if engine.config.low_precision is None:
        ways.append('"bf16": {"enabled": true}')
    ways += ["a smaller micro-batch with more gradient_accumulation_steps", "activation checkpointing"]
    place = '"nvme", "nvme_path": "/a/folder"' if at_cpu else '"cpu"'
    for key, at_stage in (("offload_optimizer", 0), ("offload_param", 3)):
        device = getattr(zero, key).device
        if stage >= at_stage and (device == "none" or (device == "cpu" and at_cpu)):
            ways.append(f'"zero_optimization": {{"{key}": {{"device": {place}}}}}')
    error.args = (
        f"{error}\n\nzeroengine holds, {engine.memory()}\n\nThe rest are activations, temporaries and what else runs "
        f"there. What takes less: {', or '.join(ways)}.",
    )
