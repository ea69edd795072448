"""``deepspeed.utils``: logging, loaders, leaf modules, and the values of single parameters."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroengine.deferred_init.meta_init import meta_init
from zeroengine.errors import ZeroEngineError

logger = logging.getLogger("zeroengine")
_LEAF = "_z3_leaf"


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks: on all with None or -1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or rank in ranks or -1 in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def set_log_level_from_string(level: str) -> None:
    """Set the level of the logger, such as "info"."""
    logger.setLevel(level.upper())


def instrument_w_nvtx(function: Any) -> Any:
    """Return the function as it is."""
    return function


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Return whether torch's version lies between two versions."""
    present = _version(torch.__version__)
    if min_version is not None and present < _version(str(min_version)):
        return False
    return max_version is None or present <= _version(str(max_version))


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory of the device, with ``force`` on rank 0."""
    if force and torch.cuda.is_available() and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.info("%s: %.2f GiB allocated", message, torch.cuda.memory_allocated() / 2**30)


class RepeatingLoader:
    """Iterates over a loader for ever.

    Args:
        loader: An iterable, such as a DataLoader.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice(torch.nn.Module):
    """A context in which modules are built without memory, for ``device="meta"``; elsewhere it does nothing.

    Args:
        dtype: Not used: the configuration has the dtype.
        device: The device.
        enabled: Whether to do anything.
    """

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        super().__init__()
        self._context = meta_init(values=False) if enabled and device == "meta" else None

    def __enter__(self) -> None:
        if self._context is not None:
            self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*error)


# -- leaf modules ---------------------------------------------------------------------------------


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes as leaves, which changes nothing, and return them.

    DeepSpeed gathers a leaf module as a whole. Here each unit is gathered as a whole, and "units" in the configuration
    names the modules that are units.

    Raises:
        ZeroEngineError: The model has no such module.
    """
    names = {
        kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}" for kind in leaf_module_classes
    }
    modules = []
    for module in model.modules():
        kind = type(module)
        if names & {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}:
            modules.append(module)
    return _mark(modules, names, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these names. See ``set_z3_leaf_modules``."""
    modules = [module for name, module in model.named_modules() if name in module_names]
    return _mark(modules, module_names, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules whose names end so. See ``set_z3_leaf_modules``."""
    modules = [module for name, module in model.named_modules() if name.endswith(tuple(module_name_suffixes))]
    return _mark(modules, module_name_suffixes, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or remove its mark."""
    setattr(model, _LEAF, flag)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of the modules of these classes, and return them."""
    modules = set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)
    for module in modules:
        set_z3_leaf_module(module, False)
    return modules


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module is marked."""
    return bool(getattr(model, _LEAF, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Return whether a parameter is marked: none is."""
    return hasattr(model, "ds_z3_leaf_module")


def _mark(modules: list[nn.Module], names: Iterable[str], raise_if_not_found: bool) -> list[nn.Module]:
    if not modules and raise_if_not_found:
        raise ZeroEngineError(f"no module of the model is one of {', '.join(sorted(map(str, names)))}")
    for module in modules:
        set_z3_leaf_module(module, True)
    if modules and os.environ.get("RANK", "0") == "0":
        logger.info(
            '%d leaf modules are marked, which changes nothing: name modules in "units" of the configuration to '
            "gather them whole",
            len(modules),
        )
    return modules
