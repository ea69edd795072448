"""Give parameters from ``meta_init`` their values for a while, before ``initialize``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from zeroengine.deferred_init.parameter import has_graph, make_meta, swap_data, take_trace, trace_of
from zeroengine.deferred_init.trace import Trace
from zeroengine.errors import ZeroEngineError
from zeroengine.ops import digest
from zeroengine.utils.torch_internals import version_of


@contextlib.contextmanager
def temporary_values(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Give those of ``params`` that are on the meta device their values inside the ``with``.

    Afterwards a parameter that was written keeps its memory until ``initialize``; the others take none again. Zeros
    that are written in place to a parameter of ``meta_init(values=False)`` count as written.

    Raises:
        ZeroEngineError: A parameter has no trace of its values or is split over ranks, or autograd has a graph of one
            that has no values.
    """
    deferred: list[tuple[nn.Parameter, torch.Tensor, Trace, object]] = []
    try:
        for param in params:
            # A parameter may be given twice, or have its values by an outer `with`.
            if param.is_meta:
                meta, trace = param.data, _compute_values(param)
                deferred.append((param, meta, trace, _contents(param, trace)))
        yield
    finally:
        in_graph = False
        for param, meta, trace, contents in deferred:
            if _contents(param, trace) != contents:
                continue
            # The graph would go on with the memory that is taken away. Values can stay, but none must not become zeros.
            if not has_graph(param):
                make_meta(param, trace, meta)
            else:
                in_graph = in_graph or trace.is_unset
    if in_graph:
        raise ZeroEngineError(
            "gathered(): autograd has a graph or a gradient of parameters that were built under "
            "meta_init(values=False) and have no values yet. Compute with them under torch.no_grad()."
        )


def _compute_values(param: nn.Parameter) -> Trace:
    """Give ``param`` memory with the values of its trace. Return the trace, which it loses."""
    trace = trace_of(param)
    if trace is None:
        raise ZeroEngineError(
            f"gathered(): a parameter of shape {tuple(param.shape)} is on the meta device and has no values. Build the "
            "model inside `with zeroengine.meta_init():` instead of torch.device('meta')."
        )
    if hasattr(param, "device_mesh"):
        raise ZeroEngineError(
            f"gathered(): a parameter of shape {tuple(param.shape)} is split over ranks and has no values before "
            "initialize(). Write values before parallelize(), or after initialize()."
        )
    if has_graph(param):
        raise ZeroEngineError(
            f"gathered(): autograd has a graph or a gradient of a parameter of shape {tuple(param.shape)} on the meta "
            "device. Drop what was computed with it, such as outputs of the model, before gathered()."
        )
    values = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=trace.device)
    trace.write(values)
    swap_data(param, values)
    take_trace(param)
    return trace


def _contents(param: nn.Parameter, trace: Trace) -> object:
    """Return what shows whether ``param`` was written: a digest, and its version where zeros may be its values."""
    return tuple(param.shape), int(digest(param)), version_of(param) if trace.is_unset else 0
