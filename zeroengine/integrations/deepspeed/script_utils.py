"""``deepspeed.utils``: logging, loaders, and the values of single parameters."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zeroengine.deferred_init.meta_init import meta_init

logger = logging.getLogger("zeroengine")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks: on all with None or -1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or rank in ranks or -1 in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def set_log_level_from_string(level: str) -> None:
    """Set the level of the logger, such as "info"."""
    logger.setLevel(level.upper())


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of nested containers whose tensors are copied to ``device``."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


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


def OnDevice(dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which modules are built without memory, for ``device="meta"``; elsewhere it does nothing.

    Args:
        dtype: Not used: the configuration has the dtype.
        device: The device.
        enabled: Whether to do anything.
    """
    return meta_init(values=False) if enabled and device == "meta" else contextlib.nullcontext()
