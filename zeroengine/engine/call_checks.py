"""Checks of the engine's public calls: their arguments, and where they come. Each raises ``ZeroEngineError``."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from zeroengine.engine.assembly import EngineParts
from zeroengine.errors import ZeroEngineError


def check_loss(loss: Any) -> None:
    """Check that ``Engine.backward`` can compute gradients of ``loss``."""
    if not isinstance(loss, torch.Tensor):
        raise ZeroEngineError(f"backward() takes the loss tensor, found {type(loss).__name__}")
    if loss.numel() != 1:
        raise ZeroEngineError(
            f"backward() takes a scalar loss, found shape {tuple(loss.shape)}: reduce it first, such as loss.mean()"
        )
    if not loss.requires_grad:
        raise ZeroEngineError(
            "backward(): the loss is detached from the parameters. Compute it from engine(...), outside "
            "torch.no_grad(), without .detach() or .item()"
        )


def check_logged_values(values: Mapping[str, Any]) -> None:
    """Check that ``values`` are such as ``Engine.log`` takes."""
    for name, value in values.items():
        is_one_element = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
        # NumPy's scalars are real numbers, too.
        if not (isinstance(value, numbers.Real) or is_one_element):
            raise ZeroEngineError(
                f"log(): {name} is {type(value).__name__}; write a number or a tensor of one element, such as "
                f"{name}=values.mean()"
            )


def check_outside_of_capture(device: torch.device, call: str) -> None:
    """Check that ``call`` is not part of the capture of a CUDA graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ZeroEngineError(
            f"{call} inside the capture of a CUDA graph: what it does on the host (counters, schedule, which "
            "gradients are overwritten) would not be done again at a replay. Leave it outside of the graph; what "
            "can be captured is the update itself, zeroengine.ops.AdamTable."
        )


def check_outside_of_backward(call: str) -> None:
    """Check that autograd does not run a backward on this thread."""
    if torch._C._current_graph_task_id() >= 0:
        raise ZeroEngineError(f"{call} inside of a backward, such as in a hook: call it after the backward")


def check_outside_of_gathered(parts: EngineParts, call: str) -> None:
    """Check that no parameters are gathered by ``zeroengine.gathered``."""
    if parts.gatherer.num_pins:
        raise ZeroEngineError(f"{call} inside `with zeroengine.gathered(...)`: leave the `with` first")
