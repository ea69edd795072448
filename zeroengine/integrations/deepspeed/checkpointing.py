"""``deepspeed.checkpointing``: activation checkpoints, by ``torch.utils.checkpoint``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

log = logging.getLogger("zeroengine")
_configured = False


def configure(mpu_: object = None, **options: object) -> None:
    """Accept DeepSpeed's options.

    Activations are recomputed in backward, and neither partitioned over ranks nor moved to the CPU.

    Args:
        mpu_: Not used.
        options: Others, such as ``partition_activations``. One that is true is logged, for it has no effect.
    """
    global _configured
    ignored = sorted(name for name, value in options.items() if value is True)
    if ignored:
        log.warning("checkpointing.configure(): %s have no effect here; activations are recomputed", ", ".join(ignored))
    _configured = True


def is_configured() -> bool:
    """Return whether ``configure`` was called."""
    return _configured


def reset() -> None:
    """Do nothing: no buffers are kept."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``, whose activations are computed again in backward."""
    return torch_checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """DeepSpeed's autograd function, as an object with ``apply``."""

    @staticmethod
    def apply(function: Callable[..., Any], outputs: list[Any], *args: Any) -> None:
        """Append what ``function(*args)`` returns to ``outputs``."""
        result = checkpoint(function, *args)
        outputs.extend(result if isinstance(result, tuple) else [result])


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch's generators."""
    torch.manual_seed(seed)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Do nothing: activations are not partitioned."""


def set_num_layers(num_layers: int) -> None:
    """Do nothing: activations are not partitioned."""
