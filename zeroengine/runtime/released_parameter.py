"""A parameter whose values are not on this rank now, or are still arriving, or whose gradient is watched.

The object stays the same ``nn.Parameter``. Its class and its data are swapped while it is released, and its metadata
(shape, dtype, hooks, ...) works as usual. A use of its values calls a resolver. The resolver waits for a gather in
progress, gathers the unit if every rank does the same (inside the engine's forward or backward), or raises.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.storages import WRAPPER_ATTRIBUTE, storages_of
from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.tensors import map_tensors, tensors_in
from zeroengine.utils.torch_internals import DisableTorchFunctionSubclass, TracingContext

# The attribute of a parameter that refers weakly to its ``ParameterOwner`` (``engine/gathered.py``). It stays for the
# life of the parameter.
OWNER_ATTRIBUTE = "_zeroengine_owner"
# Called with a released parameter and the name of the operation that needs its values.
Resolver = Callable[[nn.Parameter, str], None]

_T: Any = torch.Tensor
_PROPERTIES = (
    "shape dtype device layout requires_grad grad is_leaf grad_fn ndim names itemsize nbytes is_cuda is_cpu is_meta "
    "is_sparse is_quantized is_mps is_nested is_xpu retains_grad output_nr _version"
)
_METHODS = (
    "size dim numel nelement stride element_size is_floating_point is_complex is_contiguous is_signed get_device "
    "requires_grad_ register_hook register_post_accumulate_grad_hook __hash__ dim_order storage_offset ndimension "
    "__len__ is_inference has_names"
)
# Operations that a released parameter allows, because none of them reads a value.
METADATA = {
    *(getattr(_T, name).__get__ for name in _PROPERTIES.split() if hasattr(_T, name)),
    *(getattr(_T, name) for name in _METHODS.split() if hasattr(_T, name)),
    *(_T.requires_grad.__set__, _T.grad.__set__, _T.grad.__delete__),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}
# The attribute of a parameter that is called when user code takes ``data`` while the parameter is gathered.
DATA_OBSERVER_ATTRIBUTE = "_zeroengine_data_observer"
# The attributes of one whose gradient may be watched; of one that is released or observed: its own class, and the
# resolver.
_WATCH, _OWN_CLASS, _RESOLVER = "_zeroengine_watch", "_zeroengine_class", "_zeroengine_resolver"
# Metadata that the placeholder, which is expanded, does not have as the parameter has it while it is gathered.
_STRIDES = {getattr(_T, name) for name in ("stride", "is_contiguous", "dim_order") if hasattr(_T, name)}
_TAKE_DATA = _T.data.__get__
_READ_GRADIENT = _T.grad.__get__
_ASSIGN_GRADIENT = (_T.grad.__set__, _T.grad.__delete__)
# Methods of DTensor.
_READERS = ("to_local", "full_tensor", "redistribute")
# The classes that ``mark_released`` has swapped in, for loops that look at the class of each parameter.
RELEASED_CLASSES: set[type] = set()
_AUTOGRAD = {torch.autograd.grad, torch.autograd.backward}


class ReleasedParameter(nn.Parameter):
    """The class of a released parameter. It is never constructed: ``mark_released`` swaps it in."""

    @classmethod
    @disable_compile
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function. If it needs values of released parameters, gather them first."""
        kwargs = kwargs or {}
        # These functions use a parameter only as a place in the graph.
        if func in _AUTOGRAD:
            return func(*map_tensors(_edge_of, args), **map_tensors(_edge_of, kwargs))
        # torch.compile runs functions on parameters to infer shapes, which must gather nothing.
        if func not in METADATA and not is_tracing():
            tensors = list(tensors_in((args, kwargs)))
            for param in tensors:
                # Resolving one parameter may have gathered the others of its unit.
                if isinstance(param, ReleasedParameter) and has_no_values(param):
                    resolver_of(param)(param, _name(func))
            if func == _TAKE_DATA and (observer := args[0].__dict__.get(DATA_OBSERVER_ATTRIBUTE)) is not None:
                # Its class was not yet that of a gathered parameter.
                observer()
            if not any(is_released_parameter(tensor) for tensor in tensors):
                # The parameters' own classes, such as those of quantized weights, may have rules of their own.
                return func(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            # A wrapper of other tensors has no placeholder.
            if func in _STRIDES and 0 in args[0].stride() and has_no_values(args[0]) and not is_tracing():
                args = (torch.empty(args[0].shape, device="meta"), *args[1:])
            result = func(*args, **kwargs)
        # Each access to ``__get__`` makes another wrapper object, so equality is tested rather than identity.
        if result is None and not is_tracing():
            if func == _READ_GRADIENT:
                return _ask_owner(args[0], "engine_gradient")
            if func in _ASSIGN_GRADIENT:
                _ask_owner(args[0], "note_gradient_assigned")
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            what = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"
        return f"Parameter released by zeroengine: {what}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _deepcopy_as_own_class(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduce_as_own_class(self, protocol)


def is_tracing() -> bool:
    """Return whether torch.compile is tracing, which reads the metadata of tensors and not their values."""
    return TracingContext.try_get() is not None


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return f".{func.__self__.__name__}" if name == "__get__" else name


def drop_gradient_of(param: nn.Parameter) -> None:
    """Set ``param.grad`` to None for the engine's own use."""
    with DisableTorchFunctionSubclass():
        param.grad = None


def _ask_owner(param: nn.Parameter, method: str) -> Any:
    """Call a method of the owner of ``param``. Return None where there is no owner."""
    reference = param.__dict__.get(OWNER_ATTRIBUTE)
    owner = reference() if reference is not None else None
    return None if owner is None else getattr(owner, method)(param)


def _edge_of(tensor: torch.Tensor) -> Any:
    """Return the edge in the graph of a released parameter, and any other tensor unchanged."""
    if not is_released_parameter(tensor):
        return tensor
    with DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(tensor)


def resolver_of(param: torch.Tensor) -> Resolver:
    """Return the resolver of a released parameter."""
    resolver: Resolver = param.__dict__[_RESOLVER]
    return resolver


def _deepcopy_as_own_class(param: Any, memo: dict[int, Any]) -> Any:
    with _own_class(param, "copy.deepcopy"):
        # This is the method of the parameter's own class.
        return param.__deepcopy__(memo)


def _reduce_as_own_class(param: Any, protocol: Any) -> Any:
    with _own_class(param, "pickle"):
        return param.__reduce_ex__(protocol)


class _ObservedData:
    """Lets a gathered parameter notice that user code takes ``data``, by which it may write unseen by autograd."""

    __slots__ = ()
    __deepcopy__, __reduce_ex__ = _deepcopy_as_own_class, _reduce_as_own_class

    @property
    @disable_compile
    def data(self) -> torch.Tensor:
        """The values, as in plain PyTorch."""
        # User code may make another parameter of this class, ``type(param)(values)``, which nothing observes.
        if (observer := self.__dict__.get(DATA_OBSERVER_ATTRIBUTE)) is not None:
            observer()
        return _T.data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _T.data.__set__(self, value)


@functools.cache
def _gathered_class(cls: type) -> type:
    return type(cls.__name__, (_ObservedData, cls), _refusal_to_compile(cls))


@functools.cache
def _released_class(cls: type) -> type:
    # The parameter's own class stays a base, so that ``isinstance`` and its attributes work while it is released.
    # So does its name, by which libraries tell the classes of quantized weights apart.
    if cls is nn.Parameter:
        released = type(ReleasedParameter.__name__, (ReleasedParameter,), {})
    else:
        reading = {n: _reading(cls, n) for n in _READERS if hasattr(cls, n)}
        released = type(cls.__name__, (ReleasedParameter, cls), reading | _refusal_to_compile(cls))
    RELEASED_CLASSES.add(released)
    return released


def _refusal_to_compile(cls: type) -> dict[str, Any]:
    """Return the method by which a DTensor refuses to be traced: compiled code takes no class but that of a DTensor."""

    def flatten(self: Any) -> Any:
        if is_tracing():
            raise ZeroEngineError(
                "torch.compile works with layers that are split over ranks (DTensor) at stages 0 to 2, where "
                "parameters stay: train at one of them, or compile other layers alone"
            )
        return cls.__tensor_flatten__(self)  # type: ignore[attr-defined]

    return {"__tensor_flatten__": flatten} if hasattr(cls, "to_local") else {}


def _reading(cls: type, name: str) -> Callable[..., Any]:
    """Return a method of ``cls`` that reads values and is no torch function, which asks for the values first."""
    method = getattr(cls, name)

    @functools.wraps(method)
    @disable_compile
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_no_values(self) and not is_tracing():
            resolver_of(self)(self, name)
        return method(self, *args, **kwargs)

    return run


def is_released_parameter(param: torch.Tensor) -> bool:
    """Return whether ``param`` is released. It is faster than ``isinstance``, which torch implements in Python."""
    return issubclass(type(param), ReleasedParameter)


def class_of(param: torch.Tensor) -> Any:
    """Return the class of ``param`` in plain PyTorch."""
    return param.__dict__.get(_OWN_CLASS, type(param))


def mark_released(*params: nn.Parameter, resolver: Resolver) -> None:
    """Let every use of values of ``params`` call ``resolver`` first, which marks them gathered or raises."""
    # A second call, with another resolver, must not record the released class as the parameter's own.
    for param in params:
        attributes, cls = param.__dict__, type(param)
        if cls not in RELEASED_CLASSES:
            if _OWN_CLASS not in attributes:
                attributes[_OWN_CLASS] = cls
            param.__class__ = _released_class(attributes[_OWN_CLASS])
            if WRAPPER_ATTRIBUTE in attributes:
                mark_released(attributes[WRAPPER_ATTRIBUTE], resolver=_resolve_storages)
        attributes[_RESOLVER] = resolver


def mark_gathered(*params: nn.Parameter) -> None:
    """Note that ``params`` have values.

    Each has its own class again, unless its gradient or its data is observed.
    """
    for param in params:
        attributes = param.__dict__
        if _WATCH in attributes and attributes[_WATCH].is_on:
            mark_released(param, resolver=_use_watched)
        elif DATA_OBSERVER_ATTRIBUTE in attributes:
            if _OWN_CLASS not in attributes:
                attributes[_OWN_CLASS] = type(param)
            if _RESOLVER in attributes:
                del attributes[_RESOLVER]
            param.__class__ = _gathered_class(attributes[_OWN_CLASS])
        else:
            _restore_class(param)


def stop_observing_data(param: nn.Parameter) -> None:
    """Give a gathered parameter its own class until it is gathered again, unless its gradient is watched."""
    if not is_released_parameter(param):
        _restore_class(param)


def _restore_class(param: nn.Parameter) -> None:
    if _OWN_CLASS in param.__dict__:
        param.__class__ = param.__dict__.pop(_OWN_CLASS)
        param.__dict__.pop(_RESOLVER, None)
        wrapper = param.__dict__.get(WRAPPER_ATTRIBUTE)
        # The storages of a wrapper may belong to several units.
        if wrapper is not None and not any(is_released_parameter(storage) for _, storage in storages_of(wrapper)):
            _restore_class(wrapper)


def _resolve_storages(wrapper: nn.Parameter, operation: str) -> None:
    for _, storage in storages_of(wrapper):
        if has_no_values(storage):
            resolver_of(storage)(storage, operation)


# -- parameters whose values are here, but not their gradient ------------------------------------------


class GradientWatch:
    """Notices reads of the gradients of parameters, and assignments to them, while it ``is_on``.

    Args:
        params: The parameters. They are observed as long as they do not ``stop_observing``.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.is_on = False
        for param in params:
            param.__dict__[_WATCH] = self

    def switch(self, params: Iterable[nn.Parameter], *, on: bool) -> None:
        """Begin to notice, or end.

        Args:
            params: Those that have values. A released one has none as before, and its class notices everything.
            on: Whether to notice.
        """
        self.is_on = on
        for param in params:
            if on and not is_released_parameter(param):
                mark_released(param, resolver=_use_watched)
            elif not on:
                _stop_watching(param)


def _stop_watching(param: nn.Parameter) -> None:
    if is_released_parameter(param) and not has_no_values(param):
        mark_gathered(param)


def stop_observing(param: nn.Parameter) -> None:
    """Observe neither the gradient nor the data of ``param`` any more, because its engine ends."""
    param.__dict__.pop(DATA_OBSERVER_ATTRIBUTE, None)
    param.__dict__.pop(_WATCH, None)
    _stop_watching(param)
    stop_observing_data(param)


def has_no_values(param: torch.Tensor) -> bool:
    """Return whether the values of ``param`` are away, so that a use would gather them or raise."""
    return issubclass(type(param), ReleasedParameter) and param.__dict__[_RESOLVER] is not _use_watched


def _use_watched(param: nn.Parameter, operation: str) -> None:
    _restore_class(param)


@contextlib.contextmanager
def _own_class(param: Any, operation: str) -> Iterator[None]:
    """Give ``param``, whose values ``operation`` needs, its own class in the ``with``; to a released one for good."""
    if has_no_values(param):
        resolver_of(param)(param, operation)
    _restore_class(param)
    try:
        yield
    finally:
        mark_gathered(param)
