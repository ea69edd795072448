"""``deepspeed.zero``: models built without memory, and whole parameters for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zeroengine.deferred_init.dispatch_modes import is_recording
from zeroengine.deferred_init.meta_init import meta_init
from zeroengine.engine.gathered import gathered, owner_of
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.deepspeed import comm
from zeroengine.integrations.deepspeed.parameters import ZeroParamStatus as ZeroParamStatus
from zeroengine.integrations.deepspeed.parameters import ZeroParamType as ZeroParamType


class Init:
    """A context in which modules are built without memory: ``zeroengine.meta_init()``.

    It may be nested, and does nothing with ``enabled=False`` or for a ``module`` that is built already. The dtype and
    the place of the parameters follow from the configuration of ``initialize``, so the other arguments have no effect.

    Args:
        module: A module that is built already, which is left as it is.
        enabled: Whether to do anything.
        options: The other arguments of DeepSpeed's ``Init``.
    """

    def __init__(self, module: nn.Module | None = None, *, enabled: bool = True, **options: object) -> None:
        unknown = sorted(set(options) - _INIT_OPTIONS)
        if unknown:
            raise ZeroEngineError(f"zero.Init() takes no argument {unknown[0]!r}; it takes {sorted(_INIT_OPTIONS)}")
        self._enabled = enabled and module is None
        self._context: contextlib.ExitStack = contextlib.ExitStack()

    def __enter__(self) -> Init:
        # The outermost context records what the inner ones build.
        if self._enabled and not is_recording():
            self._context.enter_context(meta_init())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, trace)


_INIT_OPTIONS = {
    "config",
    "config_dict_or_path",
    "data_parallel_group",
    "dtype",
    "mem_efficient_linear",
    "mpu",
    "param_swapper",
    "pin_memory",
    "remote_device",
    "sequence_data_parallel_group",
    "zero_param_parallel_group",
}


class GatheredParameters:
    """A context in which parameters are whole: ``zeroengine.gathered``, where one rank's writes count.

    Args:
        params: A parameter, several, or a module.
        modifier_rank: The rank whose writes all ranks take at the end; what other ranks wrote is undone. None: as for
            ``zeroengine.gathered``, writes of any rank are kept, of several ranks the lowest's.
        fwd_module: Not needed: a parameter belongs to every module that uses it.
        enabled: Whether to do anything.
    """

    def __init__(
        self,
        params: nn.Module | nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            self._params = list(params.parameters())
        elif isinstance(params, nn.Parameter):
            self._params = [params]
        else:
            self._params = list(params)
        self._rank, self._enabled = modifier_rank, enabled
        self._context = contextlib.ExitStack()

    def __enter__(self) -> None:
        # Scripts pass all parameters of a module, some of which may belong to no engine, such as a frozen base's.
        params = [param for param in self._params if isinstance(param, nn.Parameter)]
        if self._enabled and params:
            self._context.enter_context(gathered(params))
            self._context.enter_context(_writes_of(params, self._rank))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, trace)


@contextlib.contextmanager
def _writes_of(params: list[nn.Parameter], rank: int | None) -> Iterator[None]:
    """Undo at the end what this rank wrote, if it is not ``rank``. The parameters are gathered."""
    owner = owner_of(params[0])
    if rank is None or owner is None or owner.parts.group.world_size == 1 or comm.get_rank() == rank:
        yield
        return
    before = [param.detach().clone() for param in params]
    try:
        yield
    finally:
        with torch.no_grad():
            for param, values in zip(params, before, strict=True):
                # Writing equal values would also mark the parameter as written.
                if not torch.equal(param, values):
                    param.copy_(values)


class MultipleAllGatherHandles:
    """Handles of gathers, of a framework's own, to wait for together.

    Args:
        handles: Objects with the method ``wait``.
    """

    def __init__(self, handles: Iterable[Any]) -> None:
        self.handles = list(handles)

    def wait(self, **options: Any) -> None:
        """Wait for each of them, with these options."""
        for handle in self.handles:
            handle.wait(**options)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter is gathered wherever it is used."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter is gathered wherever it is used."""


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Yield the module of an engine with whole parameters."""
    module = model.module
    with gathered(module):
        yield module


def is_zero_param(parameter: object) -> bool:
    """Return whether a parameter is partitioned by an engine at stage 3."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")
