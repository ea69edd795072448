"""``deepspeed.zero``: models built without memory, and whole parameters for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroengine.deferred_init.dispatch_modes import is_recording
from zeroengine.engine.gathered import gathered, owner_of
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.deepspeed import comm, unavailable
from zeroengine.integrations.deepspeed.parameters import ZeroParamStatus as ZeroParamStatus
from zeroengine.integrations.deepspeed.parameters import ZeroParamType as ZeroParamType
from zeroengine.integrations.deepspeed.parameters import refuses_writes
from zeroengine.integrations.deepspeed.zero_init import Init as Init

# The degrees follow from `mics_shard_size` of the configuration that `initialize` gets.
from zeroengine.integrations.deepspeed.zero_init import Init as MiCS_Init  # noqa: F401
from zeroengine.utils.process_groups import run_collective

TiledLinear, TiledLinearReturnBias = (unavailable.NAMES[name] for name in ("TiledLinear", "TiledLinearReturnBias"))


class GatheredParameters:
    """A context in which parameters are whole: ``zeroengine.gathered``, where one rank's writes count.

    Before ``initialize``, parameters that were built in ``Init`` have their values inside. ``initialize`` takes the
    values of rank 0, so what rank 0 writes reaches the others only then, and takes no memory of theirs until then.

    Args:
        params: A parameter, several, or a module.
        modifier_rank: The rank whose writes all ranks take at the end; what other ranks wrote is undone. None: as for
            ``zeroengine.gathered``, writes of any rank are kept, of several ranks the lowest's. With
            "enable_sanity_checks" in the section "zero_optimization" they are an error instead.
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


class GatheredWriteError(ZeroEngineError, RuntimeError):
    """A parameter was written where no rank may write. DeepSpeed raises RuntimeError, which scripts catch."""


@contextlib.contextmanager
def _writes_of(params: list[nn.Parameter], rank: int | None) -> Iterator[None]:
    """Let only the writes of ``rank`` stay. The parameters are gathered."""
    if rank is None:
        with _refused_writes([param for param in params if refuses_writes(param)]):
            yield
        return
    owner = owner_of(params[0])
    if owner is None:
        yield
        # While a model is built, its values are recorded, and an exchange with other ranks could not be replayed.
        if rank != 0 and not is_recording() and dist.is_initialized() and dist.get_world_size() > 1:
            for param in params:
                run_collective(lambda sent: dist.broadcast(sent, rank, async_op=True), param)
        return
    if owner.engine().world_size == 1 or comm.get_rank() == rank:
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


@contextlib.contextmanager
def _refused_writes(params: list[nn.Parameter]) -> Iterator[None]:
    """Raise at the end if one of ``params`` was written in place."""
    before = [param._version for param in params]
    yield
    written = [tuple(p.shape) for p, version in zip(params, before, strict=True) if p._version != version]
    if written:
        raise GatheredWriteError(
            f"GatheredParameters(modifier_rank=None): an in-place modification of a parameter of shape {written[0]}, "
            'and "enable_sanity_checks" refuses those. Name the rank that writes, as in modifier_rank=0'
        )


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
