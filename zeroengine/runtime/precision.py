"""What computes in which dtype: inputs at the root, modules that keep fp32, buffers, autocast."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ZeroEngineError
from .tree import map_tensors


def fp32_params(model: nn.Module, patterns: Sequence[str] | None) -> set[nn.Parameter]:
    """The parameters that keep fp32: those of the modules that ``patterns`` match.

    Raises:
        ZeroEngineError: a pattern matches no module.
    """
    return {param for module in fp32_modules(model, patterns) for param in module.parameters()}


def fp32_modules(model: nn.Module, patterns: Sequence[str] | None) -> list[nn.Module]:
    """The outermost modules whose qualified name or class name matches one of ``patterns`` (``fnmatch``)."""
    found: dict[str, nn.Module] = {}
    modules = [(name, module) for name, module in model.named_modules() if name]
    for pattern in patterns or ():
        matches = {
            name: module
            for name, module in modules
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(type(module).__name__, pattern)
        }
        if not matches:
            kinds = ", ".join(dict.fromkeys(type(module).__name__ for _, module in modules))
            raise ZeroEngineError(
                f"keep_fp32_modules: the pattern {pattern!r} matches no module, by name or class. Classes are: {kinds}"
            )
        found |= matches
    return [module for name, module in found.items() if not any(name.startswith(f"{other}.") for other in found)]


def install(
    model: nn.Module,
    *,
    low: torch.dtype | None,
    keep_fp32: Sequence[str] | None,
    autocast: torch.dtype | None,
    device_type: str,
) -> None:
    """Puts the hooks on ``model`` that make it compute as configured.

    Args:
        low: the dtype of mixed precision: floating inputs of the root are cast to it.
        keep_fp32: modules that compute in fp32 all the same, and give ``low`` back.
        autocast: the dtype of ``torch.autocast`` around the root's forward.
    """
    if low is not None:
        _cast_inputs(model, low)
        for module in fp32_modules(model, keep_fp32):
            _cast_inputs(module, torch.float32)
            module.register_forward_hook(_giving(low))
    if autocast is not None:
        contexts: list[Any] = []

        def enter(module: nn.Module, args: Any) -> None:
            contexts.append(torch.autocast(device_type, autocast))
            contexts[-1].__enter__()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if contexts:
                contexts.pop().__exit__(None, None, None)

        model.register_forward_pre_hook(enter, prepend=True)
        model.register_forward_hook(leave, always_call=True)


def _cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(to(dtype), args), map_tensors(to(dtype), kwargs)

    module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)


def _giving(dtype: torch.dtype) -> Any:
    def cast(module: nn.Module, args: Any, output: Any) -> Any:
        return map_tensors(to(dtype), output)

    return cast


def to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """A cast of floating tensors; others stay as they are."""
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def prepare_buffers(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None, synchronise: Callable[[torch.Tensor], None]
) -> None:
    """Buffers on the device, with rank 0's values. Modules that share one go on sharing it.

    Args:
        dtype: what floating buffers are cast to; None leaves each its own.
        synchronise: makes a tensor the same on all ranks.
    """
    cast = to(dtype) if dtype is not None else lambda tensor: tensor
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in moved:
                moved[buffer] = cast(buffer.to(device)).contiguous()  # an expanded one has less memory than elements
                synchronise(moved[buffer])
            if buffer is not None:
                module._buffers[name] = moved[buffer]
